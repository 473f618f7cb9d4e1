"""Dynamic schemes that cannot work as asked, found on the command line, with what would work instead."""

import argparse

from balancing.dynamics.config import DynamicsConfig

__all__ = ["check_dynamics"]

_ANY = (
    ("spec", None, "puts another model in the place of the one that is dynamic", "drop it"),
    ("use_megatron_fsdp", False, "splits layers over ranks", "use --use-distributed-optimizer"),
    ("use_torch_fsdp2", False, "splits layers over ranks", "use --use-distributed-optimizer"),
    ("cuda_graph_impl", "none", "would replay what a layer did before", "use --cuda-graph-impl none"),
    ("overlap_moe_expert_parallel_comm", False, "runs a layer in parts", "drop it"),
    ("optimizer_cpu_offload", False, "keeps optimizer state where a scheme does not find it", "drop it"),
    ("use_precision_aware_optimizer", False, "keeps optimizer state where a scheme does not find it", "drop it"),
)
# Flags that contradict a scheme: name among the arguments, value that is fine, why, and what to do.
_FREEZE = (
    (
        "untie_embeddings_and_output_weights",
        True,
        "a tied embedding is trained by the head and cannot be frozen",
        "add --untie-embeddings-and-output-weights",
    ),
    (
        "recompute_granularity",
        (None, "selective"),
        "would run frozen layers a second time for nothing",
        "use --recompute-granularity selective",
    ),
    ("mtp_num_layers", None, "trains the embedding from the back of the model", "drop it"),
    ("balance_experts", False, "waits for gradients of replicas that frozen layers do not have", "drop it"),
    ("delay_wgrad_compute", False, "asks layers for gradients that frozen ones do not have", "drop it"),
    (
        "overlap_param_gather_with_optimizer_step",
        False,
        "steps the optimizer in parts",
        "use --overlap-param-gather alone",
    ),
    ("optimizer", "adam", "has other state than frozen layers are kept with", "use --optimizer adam"),
)
_PRUNE = (
    ("optimizer", "adam", "has other state than pruned weights are kept out of", "use --optimizer adam"),
    ("transformer_impl", "local", "multiplies with modules that are not pruned", "use --transformer-impl local"),
    ("balance_experts", False, "copies experts without their masks", "drop it"),
    ("delay_wgrad_compute", False, "computes gradients after they were masked", "drop it"),
    (
        "overlap_param_gather_with_optimizer_step",
        False,
        "steps the optimizer in parts",
        "use --overlap-param-gather alone",
    ),
)


def check_dynamics(args: argparse.Namespace, config: DynamicsConfig) -> None:
    """To be called after Megatron has validated `args`. Raises ValueError for what cannot be done."""
    if not config.any:
        return
    _contradictions(args, "a dynamic model", _ANY)
    if config.freeze_layers:
        scheme = f"--freeze-layers {config.freeze_layers}"
        if config.freeze_layers >= args.num_layers:
            raise ValueError(
                f"{scheme} leaves none of --num-layers {args.num_layers} to train; freeze at most {args.num_layers - 1}"
            )
        _contradictions(args, scheme, _FREEZE)
    if config.prune_sparsity:
        scheme = f"--prune-sparsity {config.prune_sparsity}"
        _contradictions(args, scheme, _PRUNE)
        if args.num_experts and args.moe_grouped_gemm:
            raise ValueError(f"--moe-grouped-gemm holds experts that {scheme} does not reach; drop --moe-grouped-gemm")


def _contradictions(args: argparse.Namespace, scheme: str, rows: tuple[tuple[str, object, str, str], ...]) -> None:
    for name, fine, why, way_out in rows:
        value = getattr(args, name, fine)
        values = fine if isinstance(fine, tuple) else (fine,)
        if value in values or (not value and None in values):
            continue
        if fine is True:
            raise ValueError(f"{scheme} needs --{name.replace('_', '-')}: {why}; {way_out}")
        flag = "--" + name.replace("_", "-") + ("" if value is True else f" {value}")
        raise ValueError(f"{flag} cannot be combined with {scheme}: it {why}; {way_out}")

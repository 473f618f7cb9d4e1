"""Dynamic schemes that cannot work as asked, found on the command line, with what would work instead."""

import argparse

from balancing.dynamics.config import DynamicsConfig
from megatron.balanced.contradictions import Contradiction, refuse

__all__ = ["check_dynamics"]

_ANY: tuple[Contradiction, ...] = (
    ("spec", None, "puts another model in the place of the one that is dynamic", "drop it"),
    ("use_megatron_fsdp", False, "splits layers over ranks", "use --use-distributed-optimizer"),
    ("use_torch_fsdp2", False, "splits layers over ranks", "use --use-distributed-optimizer"),
    ("cuda_graph_impl", "none", "would replay what a layer did before", "use --cuda-graph-impl none"),
    ("overlap_moe_expert_parallel_comm", False, "runs a layer in parts", "drop it"),
    ("optimizer_cpu_offload", False, "keeps optimizer state where a scheme does not find it", "drop it"),
    ("use_precision_aware_optimizer", False, "keeps optimizer state where a scheme does not find it", "drop it"),
)
_FREEZE: tuple[Contradiction, ...] = (
    (
        "recompute_granularity",
        (None, "selective"),
        "would run frozen layers a second time for nothing",
        "use --recompute-granularity selective",
    ),
    ("mtp_num_layers", None, "trains the embedding from the back of the model", "drop it"),
    ("delay_wgrad_compute", False, "asks layers for gradients that frozen ones do not have", "drop it"),
    (
        "overlap_param_gather_with_optimizer_step",
        False,
        "steps the optimizer in parts",
        "use --overlap-param-gather alone",
    ),
    ("optimizer", "adam", "has other state than frozen layers are kept with", "use --optimizer adam"),
)
_PRUNE: tuple[Contradiction, ...] = (
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
_SOME_TOKENS: tuple[Contradiction, ...] = (
    ("sequence_parallel", False, "cuts the tokens that a layer chooses from over ranks", "drop it"),
    ("context_parallel_size", 1, "cuts the tokens that a layer chooses from over ranks", "use 1"),
    ("sft", False, "packs documents whose bounds are lost when tokens are left out", "drop it"),
    (
        "dataloader_inter_document_masking",
        False,
        "packs documents whose bounds are lost when tokens are left out",
        "drop it",
    ),
    ("reset_attention_mask", False, "asks for another mask than the causal one", "drop it"),
    ("apply_rope_fusion", False, "knows no positions of single tokens", "add --no-rope-fusion"),
    ("multi_latent_attention", False, "knows no positions of single tokens", "drop it"),
    ("mtp_num_layers", None, "has layers that do not know which tokens are left out", "drop it"),
)
_EXIT: tuple[Contradiction, ...] = (
    ("mixture_of_depths", 0.0, "also decides which tokens a layer takes", "use one of the two"),
    (
        "recompute_granularity",
        (None, "selective"),
        "runs layers again after it was forgotten which tokens had exited",
        "use --recompute-granularity selective",
    ),
    (
        "virtual_pipeline_model_parallel_size",
        None,
        "gives a stage several chunks, whose messages about exits could be mixed up",
        "drop it",
    ),
)
_SPARSE_ATTENTION: tuple[Contradiction, ...] = (
    ("transformer_impl", "local", "brings an attention of its own", "use --transformer-impl local"),
    ("context_parallel_size", 1, "cuts the keys over ranks", "use 1"),
    ("sft", False, "packs documents that must not attend to each other", "drop it"),
    ("dataloader_inter_document_masking", False, "packs documents that must not attend to each other", "drop it"),
    ("reset_attention_mask", False, "asks for another mask than the causal one", "drop it"),
    ("multi_latent_attention", False, "has keys of another form", "drop it"),
    ("window_size", None, "chooses keys already", "use one of the two"),
    ("softmax_type", "vanilla", "is not done block by block", "use --softmax-type vanilla"),
)


def check_dynamics(args: argparse.Namespace, config: DynamicsConfig) -> None:
    """To be called after Megatron has validated `args`. Raises ValueError for what cannot be done."""
    if not config.enabled:
        return
    refuse(args, "a dynamic model", _ANY)
    if config.freeze_layers:
        scheme = f"--freeze-layers {config.freeze_layers}"
        if config.freeze_layers >= args.num_layers:
            raise ValueError(
                f"{scheme} leaves none of --num-layers {args.num_layers} to train; freeze at most {args.num_layers - 1}"
            )
        if not args.untie_embeddings_and_output_weights:
            raise ValueError(
                f"{scheme} cannot freeze an embedding that the head trains as well; add "
                "--untie-embeddings-and-output-weights"
            )
        refuse(args, scheme, _FREEZE)
    if config.prune_sparsity:
        scheme = f"--prune-sparsity {config.prune_sparsity}"
        refuse(args, scheme, _PRUNE)
        if args.num_experts and args.moe_grouped_gemm:
            raise ValueError(f"--moe-grouped-gemm holds experts that {scheme} does not reach; drop --moe-grouped-gemm")
    if config.exits():
        scheme = f"--early-exit-layers {config.early_exit_layers}"
        if config.exits()[-1] >= args.num_layers:
            raise ValueError(
                f"{scheme}: behind layer {config.exits()[-1]} of --num-layers {args.num_layers} nothing is left to "
                f"skip; name layers up to {args.num_layers - 1}"
            )
        refuse(args, scheme, _EXIT + _SOME_TOKENS)
    if config.mixture_of_depths:
        scheme = f"--mixture-of-depths {config.mixture_of_depths}"
        if config.mixture_of_depths_every > args.num_layers:
            raise ValueError(
                f"--mixture-of-depths-every {config.mixture_of_depths_every} routes none of --num-layers "
                f"{args.num_layers}; use a number up to that"
            )
        refuse(args, scheme, _SOME_TOKENS)
    if config.sparse_attention != "none":
        refuse(args, f"--sparse-attention {config.sparse_attention}", _SPARSE_ATTENTION)

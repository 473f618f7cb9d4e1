"""Flags of Megatron-LM that a dynamic scheme cannot work with, refused at start-up."""

import argparse

from examples.dynamic_models.config import DynamicsConfig, shown
from megatron.balanced.shared.incompatible import ON, Incompatible, check_compatible, other_than

__all__ = ["INCOMPATIBLE", "check_dynamics"]

# Each scheme is checked as DYNAMICS and by its own name; schemes that leave tokens out also as SKIP.
DYNAMICS, FREEZE, PRUNE, EXIT, SKIP, SPARSE = "dynamics", "freeze", "prune", "exit", "skip", "sparse"

_PACKS = "packed documents must not attend to each other, and the scheme ignores their boundaries"
_MASK = "only the causal mask is supported"
_TOKENS = "each rank has only a part of the tokens to choose from"
_POSITIONS = "it assumes that no token is left out before a given position"
_SHARDS = "it shards the parameters of a layer over ranks"

INCOMPATIBLE: tuple[Incompatible, ...] = (
    # The model
    Incompatible("spec", ON, (DYNAMICS,), "it builds a model without our modules"),
    Incompatible("transformer_impl", other_than("local"), (PRUNE, SPARSE),
                 "its linear layers are not masked and its attention cannot be replaced",
                 "use --transformer-impl local"),
    Incompatible("hybrid_layer_pattern", ON, (DYNAMICS,), "its schemes change layers of attention and MLP together",
                 "use --num-layers"),
    Incompatible("mtp_num_layers", ON, (FREEZE,), "it trains the embedding from the last stage"),
    Incompatible("mtp_num_layers", ON, (SKIP,), "its layers expect all tokens"),
    Incompatible("balance_experts", ON, (PRUNE,), "replicas of experts are made without their masks"),
    # Attention, positions and data
    Incompatible("multi_latent_attention", ON, (SKIP,), _POSITIONS),
    Incompatible("multi_latent_attention", ON, (SPARSE,), "its keys are compressed"),
    Incompatible("window_size", ON, (SPARSE,), "both choose the keys of a query", "use one of the two"),
    Incompatible("softmax_type", other_than("vanilla"), (SPARSE,),
                 "only the plain softmax is computed block by block", "use --softmax-type vanilla"),
    Incompatible("apply_rope_fusion", ON, (SKIP,), _POSITIONS, "add --no-rope-fusion"),
    Incompatible("reset_attention_mask", ON, (SKIP, SPARSE), _MASK),
    Incompatible("sft", ON, (SKIP, SPARSE), _PACKS),
    Incompatible("dataloader_inter_document_masking", ON, (SKIP, SPARSE), _PACKS),
    # Parallelism and overlaps
    Incompatible("fake_process_group", ON, (DYNAMICS,),
                 "its messages never arrive, so ranks would make different decisions"),
    Incompatible("sequence_parallel", ON, (SKIP,), _TOKENS),
    Incompatible("context_parallel_size", other_than(1), (SKIP, SPARSE), _TOKENS, "use --context-parallel-size 1"),
    Incompatible("virtual_pipeline_model_parallel_size", ON, (EXIT,),
                 "messages about exits of the chunks of a stage could be mixed up"),
    Incompatible("use_megatron_fsdp", ON, (DYNAMICS,), _SHARDS, "use --use-distributed-optimizer"),
    Incompatible("use_torch_fsdp2", ON, (DYNAMICS,), _SHARDS, "use --use-distributed-optimizer"),
    Incompatible("overlap_moe_expert_parallel_comm", ON, (DYNAMICS,),
                 "it runs a layer in parts, and the layer must run as a whole"),
    Incompatible("delay_wgrad_compute", ON, (PRUNE,), "it computes weight gradients after they were masked"),
    Incompatible("delay_wgrad_compute", ON, (FREEZE,), "frozen layers have no weight gradients to compute later"),
    Incompatible("overlap_param_gather_with_optimizer_step", ON, (FREEZE, PRUNE),
                 "it steps the optimizer in parts, and weights must be complete between steps",
                 "use --overlap-param-gather alone"),
    # Memory, graphs and the optimizer
    Incompatible("recompute_granularity", other_than("selective"), (FREEZE,), "it runs frozen layers twice for nothing",
                 "use --recompute-granularity selective"),
    Incompatible("recompute_granularity", other_than("selective"), (EXIT,),
                 "it runs layers again when it is no longer known which tokens had exited",
                 "use --recompute-granularity selective"),
    Incompatible("cuda_graph_impl", other_than("none"), (DYNAMICS,),
                 "a CUDA graph repeats the step that it captured, and later steps differ",
                 "use --cuda-graph-impl none"),
    Incompatible("optimizer", other_than("adam"), (FREEZE, PRUNE), "the scheme edits the moments of Adam",
                 "use --optimizer adam"),
    Incompatible("use_precision_aware_optimizer", ON, (DYNAMICS,),
                 "its main parameters and moments cannot be read"),
    Incompatible("optimizer_cpu_offload", ON, (DYNAMICS,), "it keeps optimizer state on the host",
                 "use --use-distributed-optimizer to save memory"),
)  # fmt: skip


def check_dynamics(args: argparse.Namespace, config: DynamicsConfig) -> None:
    """Raise ValueError for schemes that cannot work. Called after Megatron has validated `args`."""
    if not config.enabled:
        return
    _check(args, DYNAMICS, "a dynamic model")
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
        _check(args, FREEZE, scheme)
    if config.prune_sparsity:
        _check(args, PRUNE, f"--prune-sparsity {config.prune_sparsity}")
    if config.early_exit_layers:
        scheme, last = shown("early_exit_layers", config.early_exit_layers), config.early_exit_layers[-1]
        if last >= args.num_layers:
            raise ValueError(
                f"{scheme}: after layer {last} of --num-layers {args.num_layers} no layer is left to skip; name layers "
                f"up to {args.num_layers - 1}"
            )
        _check(args, EXIT, scheme)
        _check(args, SKIP, scheme)
    if config.mixture_of_depths:
        if config.mixture_of_depths_every > args.num_layers:
            raise ValueError(
                f"--mixture-of-depths-every {config.mixture_of_depths_every} routes none of --num-layers "
                f"{args.num_layers}; use a number up to that"
            )
        _check(args, SKIP, f"--mixture-of-depths {config.mixture_of_depths}")
    if config.sparse_attention != "none":
        _check(args, SPARSE, f"--sparse-attention {config.sparse_attention}")


def _check(args: argparse.Namespace, feature: str, given: str) -> None:
    check_compatible(args, feature, given, table=INCOMPATIBLE)

"""Megatron-LM flags and config fields that are incompatible with a feature: one table for all balancers.

They are refused at start-up. Most of them would give wrong numbers or hang without an error: they replace a module that
the feature replaces, keep state that the feature does not read, or replay work that the feature changes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["INCOMPATIBLE", "Incompatible", "IncompatibleError", "check_compatible", "refused", "shown"]

# Features. Balanced experts without Transformer Engine are also checked as OWN_EXPERTS.
OWN_EXPERTS = "own experts"
EXPERTS, SEQUENCES, LAYERS, RELEASE, REPORT = "experts", "sequences", "layers", "release", "report"
# Sequences are also checked as SEQUENCES_OF_DATA if data-parallel ranks share micro-batches,
SEQUENCES_OF_DATA = "sequences of data-parallel ranks"
# and as SEQUENCES_OF_STEP if documents are distributed over the micro-batches of a step.
SEQUENCES_OF_STEP = "sequences of a step"
FILL = "fill"  # --fill-with-weight-gradients
HYBRID = "hybrid"  # --hybrid-layer-pattern
HYBRID_SEGMENTS = "hybrid segments"  # with | in it


# Arguments whose flag has another name.
_OPTIONS = {
    "fp4": "fp4_format",
    "fp8": "fp8_format",
    "gtp_weight_remat_size": "tensor_parallel_num_weight_shards",
    "nccl_ub": "use_nccl_ub",
    "virtual_pipeline_model_parallel_size": "num_virtual_stages_per_pipeline_rank",
}


@dataclass(frozen=True)
class Incompatible:
    """One row of the table.

    flag: the name among the arguments.
    allowed: the values that work. None, False, 0 and "" count as one value: the flag is off.
    features: what the other values are incompatible with.
    why: a clause for the user; "it" is the flag.
    instead: the way out.
    """

    flag: str
    allowed: tuple[object, ...]
    features: tuple[str, ...]
    why: str
    instead: str = "drop it"

    def refuses(self, given: Mapping[str, object]) -> bool:
        """Whether `given` has a value that does not work. given: values by their name among the arguments."""
        value = given.get(self.flag, self.allowed[0])
        return value not in self.allowed and bool(value or all(self.allowed))


class IncompatibleError(ValueError):
    """Flags that a feature does not work with. why: flag, as a user gives it -> the reason."""

    def __init__(self, message: str, why: dict[str, str]) -> None:
        super().__init__(message)
        self.why = why


def check_compatible(
    args: Any,
    feature: str | tuple[str, ...],
    given: str,
    also: Sequence[tuple[str, str, str]] = (),
    table: Sequence[Incompatible] | None = None,
) -> None:
    """Raise IncompatibleError if values in `args` are incompatible with `feature`. The message explains the first.

    args: Megatron-LM's arguments.
    feature: one or several of the features above.
    given: the flag that switched the feature on, as the user gave it.
    also: further incompatible flags: (flag as the user gave it, why, way out).
    table: used instead of INCOMPATIBLE; `feature` then names features in its rows.
    """
    rows = refused(vars(args), feature, table)
    found = [(shown(row.flag, getattr(args, row.flag)), row.why, row.instead) for row in rows] + list(also)
    if found:
        (flag, why, instead), *others = found
        more = f" (also incompatible: {', '.join(other for other, *_ in others)})" if others else ""
        raise IncompatibleError(
            f"{given} is incompatible with {flag}: {why}; {instead}{more}", {flag: why for flag, why, _ in found}
        )


def refused(
    given: Mapping[str, object], feature: str | tuple[str, ...], table: Sequence[Incompatible] | None = None
) -> list[Incompatible]:
    """The rows of the table that refuse a value for `feature`. given: values by their name among the arguments."""
    features = {feature} if isinstance(feature, str) else {*feature}
    return [
        row for row in (INCOMPATIBLE if table is None else table) if features & {*row.features} and row.refuses(given)
    ]


def shown(name: str, value: object) -> str:
    """A flag as a user gives it."""
    given = " ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
    return "--" + _OPTIONS.get(name, name).replace("_", "-") + ("" if value is True else f" {given}")


_OFF = (None,)
_BALANCERS = (EXPERTS, SEQUENCES, LAYERS)
_GRAPH = "a CUDA graph repeats the step that it captured, and later steps differ"
_HOOKS = "the report measures with hooks on modules, which cannot be part of a CUDA graph"
_TE_EXPERTS = "it needs Transformer Engine's grouped experts"
_USE_TE_EXPERTS = "use --transformer-impl transformer_engine --moe-grouped-gemm"
_MODULES = "our modules, which replace Megatron-LM's, do not support it"
_STATE = "its state passes from each token to the next, and a rank has only pieces of documents"
_LOGITS = "it reads attention scores, of which each rank has only a part"
_BUILDS = "it builds layers that cannot move yet"
_SEGMENTS = "the segments of the pattern, between |, say which stage has which layers"
_COUNTS = "it counts the layers of a stage in advance"
_LEAVE = "it treats ranks that leave as failed"
_DROPS = "which tokens it drops depends on the other tokens of their rank"
_STEPS = "documents are distributed over the micro-batches of a step, and steps must have one size"
_SCALES = "it is stored with a scale for each shard, and a move changes the shards"
_IN_PARTS = "it steps the optimizer in parts, and weights must be complete between steps"

INCOMPATIBLE: tuple[Incompatible, ...] = (
    # The model
    Incompatible("spec", _OFF, _BALANCERS, "it builds a model without our modules"),
    Incompatible("transformer_impl", ("local", "transformer_engine"), (EXPERTS, SEQUENCES),
                 "its experts and its attention cannot be replaced", "use --transformer-impl local"),
    Incompatible("transformer_impl", ("local", "transformer_engine"), (HYBRID,), "its layers cannot be trained",
                 "use --transformer-impl transformer_engine"),
    Incompatible("num_layers_per_virtual_pipeline_stage", _OFF, (HYBRID,), _SEGMENTS),
    Incompatible("num_virtual_stages_per_pipeline_rank", _OFF, (HYBRID,), _SEGMENTS),
    Incompatible("pipeline_model_parallel_layout", _OFF, (HYBRID,), _SEGMENTS),
    Incompatible("account_for_embedding_in_pipeline_split", _OFF, (HYBRID,), _SEGMENTS),
    Incompatible("account_for_loss_in_pipeline_split", _OFF, (HYBRID,), _SEGMENTS),
    Incompatible("decoder_first_pipeline_num_layers", _OFF, (HYBRID_SEGMENTS,), _SEGMENTS),
    Incompatible("decoder_last_pipeline_num_layers", _OFF, (HYBRID_SEGMENTS,), _SEGMENTS),
    Incompatible("moe_layer_freq", (1,), (HYBRID,), "E in the pattern says which layers have experts"),
    Incompatible("qk_layernorm", _OFF, (HYBRID,), "Megatron-LM leaves these norms out of hybrid models"),
    Incompatible("qk_l2_norm", _OFF, (HYBRID,), "Megatron-LM leaves these norms out of hybrid models"),
    Incompatible("experimental_attention_variant", _OFF, (HYBRID,), "the pattern says which attention layers have"),
    Incompatible("linear_attention_freq", _OFF, (HYBRID,), "the pattern says which attention layers have"),
    Incompatible("heterogeneous_layers_config_path", _OFF, (HYBRID,), "the pattern says what layers are"),
    Incompatible("heterogeneous_layers_config_encoded_json", _OFF, (HYBRID,), "the pattern says what layers are"),
    Incompatible("overlap_moe_expert_parallel_comm", _OFF, (HYBRID,),
                 "Megatron-LM only runs layers of GPT models in parts"),
    Incompatible("moe_use_upcycling", _OFF, (HYBRID,), "it upcycles GPT models"),
    Incompatible("heterogeneous_layers_config_path", _OFF, (LAYERS,), _BUILDS),
    Incompatible("heterogeneous_layers_config_encoded_json", _OFF, (LAYERS,), _BUILDS),
    Incompatible("init_model_with_meta_device", _OFF, (LAYERS,), "layers that arrive are built on the device"),
    Incompatible("moe_use_upcycling", _OFF, (LAYERS,), "it builds the model twice", "upcycle in a separate run"),
    Incompatible("mtp_num_layers", _OFF, (RELEASE,), "layers of multi-token prediction cannot change their stage"),
    # Experts
    Incompatible("use_te_activation_func", _OFF, (EXPERTS,), _MODULES),
    Incompatible("mlp_chunks_for_training", (1,), (EXPERTS,),
                 "the tokens of a micro-batch then pass through the experts in several parts", "use 1"),
    Incompatible("moe_grouped_gemm", _OFF, (OWN_EXPERTS,), _TE_EXPERTS,
                 "use --transformer-impl transformer_engine, or drop it"),
    Incompatible("use_transformer_engine_op_fuser", _OFF, (OWN_EXPERTS,), _TE_EXPERTS, _USE_TE_EXPERTS),
    Incompatible("moe_mlp_glu_interleave_size", _OFF, (OWN_EXPERTS,), _TE_EXPERTS, _USE_TE_EXPERTS),
    Incompatible("moe_single_grouped_weight", _OFF, (EXPERTS,),
                 "it keeps all experts in one weight, and replicas are further weights"),
    Incompatible("moe_single_grouped_bias", _OFF, (EXPERTS,),
                 "it keeps all experts in one bias, and replicas are further biases"),
    Incompatible("moe_pad_expert_input_to_capacity", _OFF, (EXPERTS,),
                 "it pads logical experts, and replicas would take the padding for tokens",
                 "use --moe-expert-capacity-factor without it"),
    Incompatible("moe_ncclep_static_shape", _OFF, (EXPERTS,), "it passes experts more rows than they have tokens"),
    Incompatible("moe_routing_trace_path", _OFF, (LAYERS,), "it records routers that a move replaces",
                 "use --balance-report"),
    # Attention, positions and data
    Incompatible("attention_dropout", _OFF, (SEQUENCES,),
                 "it drops other attention scores than a run on one rank", "use --attention-dropout 0"),
    Incompatible("experimental_attention_variant", (None, "dsa"), (SEQUENCES,), _STATE),
    Incompatible("experimental_attention_variant", (None, "gated_delta_net"), (SEQUENCES,),
                 "it chooses keys by their scores among all keys of a document, and a rank has only pieces"),
    Incompatible("linear_attention_freq", _OFF, (SEQUENCES,), _STATE),
    Incompatible("qk_clip", _OFF, (SEQUENCES,), _LOGITS),
    Incompatible("log_max_attention_logit", _OFF, (SEQUENCES,), _LOGITS),
    Incompatible("position_embedding_type", ("learned_absolute", "rope", "yarn", "none"), (SEQUENCES,),
                 "it does not count positions from the beginning of a document",
                 "use --position-embedding-type rope"),
    Incompatible("reset_attention_mask", _OFF, (SEQUENCES,), "it makes a dense mask",
                 "use --dataloader-inter-document-masking instead"),
    Incompatible("hybrid_context_parallel", _OFF, (SEQUENCES,), "it splits batches in its own way", "drop it"),
    Incompatible("hybrid_context_parallel", _OFF, (RELEASE,), "its process groups cannot shrink yet"),
    Incompatible("dataloader_type", ("single", None), (SEQUENCES_OF_DATA, SEQUENCES_OF_STEP),
                 "it gives data-parallel ranks samples in an order of its own", "use --dataloader-type single"),
    Incompatible("rampup_batch_size", _OFF, (SEQUENCES_OF_STEP,), _STEPS),
    Incompatible("step_batch_size_schedule", _OFF, (SEQUENCES_OF_STEP,), _STEPS),
    Incompatible("decrease_batch_size_if_needed", _OFF, (SEQUENCES_OF_STEP,), _STEPS),
    Incompatible("full_validation", _OFF, (SEQUENCES_OF_DATA,),
                 "data-parallel ranks may have different numbers of validation samples", "use --eval-iters"),
    Incompatible("fim_data", _OFF, (SEQUENCES_OF_DATA, SEQUENCES_OF_STEP),
                 "its permutations depend on the samples that a rank has read before"),
    Incompatible("moe_expert_capacity_factor", _OFF, (SEQUENCES_OF_DATA, SEQUENCES_OF_STEP), _DROPS),
    Incompatible("moe_expert_rank_capacity_factor", _OFF, (SEQUENCES_OF_DATA, SEQUENCES_OF_STEP), _DROPS),
    Incompatible("gtp_weight_remat_size", (1, None), (SEQUENCES_OF_DATA,),
                 "its ranks have other micro-batches, in addition to data-parallel ranks"),
    # Weight gradients that wait
    Incompatible("transformer_impl", ("local", "transformer_engine"), (FILL,),
                 "its linear layers compute weight gradients in their backward passes",
                 "use --transformer-impl transformer_engine"),
    Incompatible("use_transformer_engine_op_fuser", _OFF, (FILL,),
                 "its fused products compute weight gradients in their backward passes"),
    Incompatible("tp_comm_overlap", _OFF, (FILL,), "its messages overlap the computation of weight gradients"),
    Incompatible("overlap_dispatch_backward_with_experts_wgrad", _OFF, (FILL,),
                 "both decide when weight gradients are computed"),
    Incompatible("overlap_moe_expert_parallel_comm", _OFF, (FILL,), "it alternates parts of two passes"),
    Incompatible("delay_wgrad_compute", _OFF, (FILL,), "both decide when weight gradients are computed"),
    Incompatible("defer_embedding_wgrad_compute", _OFF, (FILL,), "both decide when weight gradients are computed"),
    Incompatible("use_ring_exchange_p2p", _OFF, (FILL,), "its messages cannot be waited for later"),
    Incompatible("use_megatron_fsdp", _OFF, (FILL,), "it shards the parameters of a layer over ranks",
                 "use --use-distributed-optimizer"),
    Incompatible("use_torch_fsdp2", _OFF, (FILL,), "it shards the parameters of a layer over ranks",
                 "use --use-distributed-optimizer"),
    Incompatible("gtp_weight_remat_size", (1, None), (FILL,), "it gathers weights again for their gradients"),
    Incompatible("cuda_graph_impl", ("none",), (FILL,), _GRAPH, "use --cuda-graph-impl none"),
    Incompatible("enable_cuda_graph", _OFF, (FILL,), _GRAPH),
    Incompatible("external_cuda_graph", _OFF, (FILL,), _GRAPH),
    # Parallelism and overlaps
    Incompatible("use_tp_pp_dp_mapping", _OFF, (RELEASE,), "it spreads each stage over all nodes, so no node is freed"),
    Incompatible("use_megatron_fsdp", _OFF, (EXPERTS, LAYERS),
                 "it shards the parameters of a layer over ranks", "use --use-distributed-optimizer"),
    Incompatible("use_torch_fsdp2", _OFF, (EXPERTS, LAYERS),
                 "it shards the parameters of a layer over ranks", "use --use-distributed-optimizer"),
    Incompatible("use_megatron_fsdp", _OFF, (SEQUENCES,), "the two were never tested together",
                 "use --use-distributed-optimizer"),
    Incompatible("use_torch_fsdp2", _OFF, (SEQUENCES,), "the two were never tested together",
                 "use --use-distributed-optimizer"),
    Incompatible("gtp_weight_remat_size", (1, None), (LAYERS,), "a move does not support the way it shards weights"),
    Incompatible("overlap_dispatch_backward_with_experts_wgrad", _OFF, (EXPERTS,),
                 "Megatron-LM reduces gradients of experts before it has computed them, unless --delay-wgrad-compute "
                 "is given",
                 "use --overlap-moe-expert-parallel-comm --delay-wgrad-compute"),
    Incompatible("overlap_param_gather_with_optimizer_step", _OFF, (EXPERTS, LAYERS), _IN_PARTS,
                 "use --overlap-param-gather alone"),
    Incompatible("nccl_ub", _OFF, (LAYERS,), "it registers buffers that a move replaces"),
    # Memory, precision and graphs
    Incompatible("fp8", _OFF, (OWN_EXPERTS,), _TE_EXPERTS, "add --moe-grouped-gemm, or use --bf16"),
    Incompatible("fp4", _OFF, (EXPERTS,), "replicas were never tested with it", "use --fp8-format or --bf16"),
    Incompatible("moe_single_grouped_weight", _OFF, (LAYERS,),
                 "it stores experts in one tensor, which a move does not support"),
    Incompatible("fp4", _OFF, (LAYERS,), "a move does not transfer its scales", "use --bf16"),
    Incompatible("fine_grained_activation_offloading", _OFF, (RELEASE,),
                 "it fails on a stage with one layer, which a shorter pipeline may have"),
    Incompatible("cpu_offloading_num_layers", _OFF, (LAYERS,), _COUNTS),
    Incompatible("cuda_graph_impl", ("none",), (SEQUENCES,), _GRAPH, "use --cuda-graph-impl none"),
    Incompatible("cuda_graph_impl", ("none", "transformer_engine", "full_iteration"), (EXPERTS,), _GRAPH,
                 "use --cuda-graph-impl transformer_engine --cuda-graph-modules attn moe_router"),
    Incompatible("cuda_graph_impl", ("none", "transformer_engine"), (LAYERS,),
                 "it cannot be captured again after a move", "use --cuda-graph-impl transformer_engine"),
    Incompatible("cuda_graph_impl", ("none",), (RELEASE,), "its graphs hold process groups that shrink",
                 "use --cuda-graph-impl none"),
    Incompatible("enable_cuda_graph", _OFF, (*_BALANCERS, RELEASE), _GRAPH),
    Incompatible("external_cuda_graph", _OFF, (SEQUENCES, RELEASE), _GRAPH),
    Incompatible("cuda_graph_impl", ("none",), (REPORT,), _HOOKS, "use --cuda-graph-impl none"),
    Incompatible("enable_cuda_graph", _OFF, (REPORT,), _HOOKS),
    Incompatible("external_cuda_graph", _OFF, (REPORT,), _HOOKS),
    Incompatible("optimizer_cuda_graph", _OFF, (LAYERS,), "the graph belongs to an optimizer that a move replaces"),
    # The optimizer, checkpoints and the job
    Incompatible("optimizer", ("adam", "sgd", "muon", "dist_muon", "lion", "adaptive_muon"), (LAYERS,),
                 "it keeps matrices that do not have the shape of a weight, which a move does not support",
                 "use --optimizer muon"),
    Incompatible("optimizer", ("adam", "sgd", "muon", "dist_muon", "lion", "soap"), (LAYERS,),
                 "Megatron-LM 0.19.2 cannot run it with emerging-optimizers 0.3.0, so no move was tried",
                 "use --optimizer muon"),
    Incompatible("optimizer_cpu_offload", _OFF, (LAYERS,), "it keeps optimizer state on the host",
                 "use --use-distributed-optimizer to save memory"),
    Incompatible("main_params_dtype", ("fp32",), (LAYERS,), _SCALES, "use --main-params-dtype fp32"),
    Incompatible("exp_avg_dtype", ("fp32", "bf16"), (LAYERS,), _SCALES, "use --exp-avg-dtype bf16"),
    Incompatible("exp_avg_sq_dtype", ("fp32", "bf16"), (LAYERS,), _SCALES, "use --exp-avg-sq-dtype bf16"),
    Incompatible("num_distributed_optimizer_instances", (1, None), (RELEASE,),
                 "the optimizer's groups cannot shrink yet"),
    Incompatible("non_persistent_ckpt_type", (None, "global", "in_memory"), (LAYERS,),
                 "it saves state by rank, and layers change ranks", "use --non-persistent-ckpt-type global"),
    Incompatible("async_save", _OFF, (RELEASE,), "ranks may leave before a checkpoint is complete"),
    Incompatible("ckpt_assume_constant_structure", _OFF, (LAYERS,),
                 "it saves by the plan of the first save, and layers change ranks"),
    Incompatible("wandb_project", _OFF, (RELEASE,), "the rank that writes it leaves", "use --tensorboard-dir"),
    Incompatible("log_straggler", _OFF, (RELEASE,), "it counts ranks that have left", "use --balance-report"),
    Incompatible("enable_ft_package", _OFF, (RELEASE,), _LEAVE),
    Incompatible("inprocess_restart", _OFF, (RELEASE,), _LEAVE),
)  # fmt: skip

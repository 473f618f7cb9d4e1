"""Megatron-LM flags and config fields that are incompatible with a feature: one table for all balancers and loops.

They are refused at start-up. Most of them would give wrong numbers or hang without an error: they replace a module that
the feature replaces, keep state that the feature does not read, or replay work that the feature changes.

Config fields of `megatron.core` have the names of Megatron-LM's flags, so a row is for both. `pretrain_gpt.py` reads
the table with its flags before anything is built, a balancer of another loop with the model's configs when it is
constructed (`megatron.balanced.shared.model_checks`). `python -m tests.support.limits` writes it into the documents.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

__all__ = [
    "INCOMPATIBLE",
    "ON",
    "Incompatible",
    "IncompatibleError",
    "Values",
    "check_compatible",
    "one_of",
    "other_than",
    "refused",
    "shown",
    "switch_off",
]

# Features. Balanced experts without Transformer Engine are also checked as OWN_EXPERTS.
OWN_EXPERTS = "own experts"
EXPERTS, SEQUENCES, LAYERS, RELEASE = "experts", "sequences", "layers", "release"
# Sequences are also checked as SEQUENCES_OF_DATA if data-parallel ranks share micro-batches,
SEQUENCES_OF_DATA = "sequences of data-parallel ranks"
# and as SEQUENCES_OF_STEP if documents are distributed over the micro-batches of a step.
SEQUENCES_OF_STEP = "sequences of a step"
ATTENTION = "attention alone"  # sequences of other loops, whose tokens stay where they are
FILL = "fill"  # --fill-with-weight-gradients
LATE = "late copies"  # experts with late_slots
FP64 = "float64"  # --fp64
HYBRID = "hybrid"  # --hybrid-layer-pattern
HYBRID_SEGMENTS = "hybrid segments"  # with | in it

# Where a row applies, if not everywhere. pretrain_gpt.py captures CUDA graphs again after a plan has changed.
TRAINER, LOOPS = "pretrain_gpt.py", "other loops"

# Arguments whose flag has another name.
_OPTIONS = {
    "expert_gtp_weight_remat_size": "expert_tensor_parallel_num_weight_shards",
    "fp4": "fp4_format",
    "fp8": "fp8_format",
    "gtp_weight_remat_size": "tensor_parallel_num_weight_shards",
    "nccl_ub": "use_nccl_ub",
    "virtual_pipeline_model_parallel_size": "num_virtual_stages_per_pipeline_rank",
}
_OFF = {"cuda_graph_impl": "none"}  # values that switch a flag off, if not False


@dataclass(frozen=True)
class Values:
    """Values of a flag. None, False, 0 and "", or a list of these, mean that the flag is off and are never among them.

    named: these values; of a list, one element is enough.
    others: instead, all values but the named ones.
    """

    named: tuple[object, ...]
    others: bool = False

    def __contains__(self, value: object) -> bool:
        elements = value if isinstance(value, list) else [value]
        if not any(elements):
            return False
        return value not in self.named if self.others else any(element in self.named for element in elements)


def one_of(*values: object) -> Values:
    """These values of a flag."""
    return Values(values)


def other_than(*values: object) -> Values:
    """All values of a flag but these, and but those that switch it off."""
    return Values(values, others=True)


ON = other_than()


@dataclass(frozen=True)
class Incompatible:
    """One row of the table.

    flag: the name among the arguments and config fields.
    values: the values that are refused.
    features: what they are incompatible with.
    why: a clause for the user; "it" is the flag.
    instead: the way out.
    only_with: name of another flag -> the values of it with which the row counts; it counts if all have such values.
    where: TRAINER or LOOPS if the row counts only there; TRAINER also for a flag that is no config field.
    switches_off: whether `pretrain_gpt.py` does not refuse the flag but switches it off, since no number depends on it.
    """

    flag: str
    values: Values
    features: tuple[str, ...]
    why: str
    instead: str = "drop it"
    only_with: Mapping[str, Values] = field(default_factory=dict)
    where: str | None = None
    switches_off: bool = False

    def refuses(self, given: Mapping[str, object]) -> bool:
        """Whether `given` has values that do not work. given: values by their names among the arguments."""
        pairs = {self.flag: self.values, **self.only_with}
        return all(_named(given.get(name)) in values for name, values in pairs.items())

    @property
    def instead_of_field(self) -> str:
        """The way out, with config fields in the place of flags."""
        instead = self.instead.replace(f"use {shown(self.flag, True)} ", "use ")
        return re.sub(r"--[a-z0-9-]+", lambda flag: flag[0][2:].replace("-", "_"), instead)


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
    rows = refused(vars(args), feature, TRAINER, table)
    refusals = [(shown(row.flag, getattr(args, row.flag)), row.why, row.instead) for row in rows] + list(also)
    if refusals:
        (flag, why, instead), *others = refusals
        more = f" (also incompatible: {', '.join(other for other, *_ in others)})" if others else ""
        raise IncompatibleError(
            f"{given} is incompatible with {flag}: {why}; {instead}{more}", {flag: why for flag, why, _ in refusals}
        )


def switch_off(args: Any, feature: str, given: str) -> list[str]:
    """Switch off flags in `args` that need not be refused. Returns notes for the user, one line each.

    Parameters as of `check_compatible`. Called once the feature is certain to be on.
    """
    notes = []
    for row in INCOMPATIBLE:
        if row.switches_off and feature in row.features and row.refuses(vars(args)):
            notes.append(f"{given} switches {shown(row.flag, getattr(args, row.flag))} off: {row.why}")
            setattr(args, row.flag, _OFF.get(row.flag, False))
    return notes


def refused(
    given: Mapping[str, object],
    feature: str | tuple[str, ...],
    where: str,
    table: Sequence[Incompatible] | None = None,
) -> list[Incompatible]:
    """The rows of the table that refuse a value for `feature`.

    given: values by their names among the arguments.
    where: TRAINER or LOOPS.
    """
    features = {feature} if isinstance(feature, str) else {*feature}
    return [
        row
        for row in (INCOMPATIBLE if table is None else table)
        if features & {*row.features} and row.where in (None, where) and row.refuses(given)
        if not (row.switches_off and where == TRAINER)
    ]


def shown(name: str, value: object) -> str:
    """A flag as a user gives it."""
    given = " ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(_named(value))
    return "--" + _OPTIONS.get(name, name).replace("_", "-") + ("" if value is True else f" {given}")


def _named(value: object) -> object:
    """The name that users give to a member of an enumeration."""
    return value.name if isinstance(value, Enum) else value


_BALANCERS = (EXPERTS, SEQUENCES, LAYERS)
_GRAPH = "a CUDA graph repeats the step that it captured, and later steps differ"
_PLANS = (
    "a graph repeats the plan that it captured, and each micro-batch has its own; the host launches each kernel again"
)
_CAPTURED = "a captured graph repeats the plain model"
_TE_EXPERTS = "it needs Transformer Engine's grouped experts"
_USE_TE_EXPERTS = "use --transformer-impl transformer_engine --moe-grouped-gemm"
_OWN_BALANCER = "with it Megatron-LM balances experts itself"
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
_MIXED = "it stores experts of some layers in another format, and replica slots have one format"
_PACKED = "it stores weights packed, which cannot be sent yet; those in bf16 are quantized where they are used"
_PADDING = "with --sft routers see padding, which balanced sequences leave out"
_LATER = "it computes weight gradients when the next pass may have filled the late slot"
_IN_PARTS = "it steps the optimizer in parts, and weights must be complete between steps"

INCOMPATIBLE: tuple[Incompatible, ...] = (
    # The model
    Incompatible("spec", ON, _BALANCERS, "it builds a model without our modules", where=TRAINER),
    Incompatible("transformer_impl", other_than("local", "transformer_engine"), (EXPERTS, SEQUENCES),
                 "its experts and its attention cannot be replaced", "use --transformer-impl local"),
    Incompatible("transformer_impl", other_than("local", "transformer_engine"), (HYBRID,),
                 "its layers cannot be trained", "use --transformer-impl transformer_engine"),
    Incompatible("num_layers_per_virtual_pipeline_stage", ON, (HYBRID,), _SEGMENTS),
    Incompatible("num_virtual_stages_per_pipeline_rank", ON, (HYBRID,), _SEGMENTS),
    Incompatible("pipeline_model_parallel_layout", ON, (HYBRID,), _SEGMENTS),
    Incompatible("account_for_embedding_in_pipeline_split", ON, (HYBRID,), _SEGMENTS),
    Incompatible("account_for_loss_in_pipeline_split", ON, (HYBRID,), _SEGMENTS),
    Incompatible("decoder_first_pipeline_num_layers", ON, (HYBRID_SEGMENTS,), _SEGMENTS),
    Incompatible("decoder_last_pipeline_num_layers", ON, (HYBRID_SEGMENTS,), _SEGMENTS),
    Incompatible("moe_layer_freq", other_than(1), (HYBRID,), "E in the pattern says which layers have experts"),
    Incompatible("qk_layernorm", ON, (HYBRID,), "Megatron-LM leaves these norms out of hybrid models"),
    Incompatible("qk_l2_norm", ON, (HYBRID,), "Megatron-LM leaves these norms out of hybrid models"),
    Incompatible("experimental_attention_variant", ON, (HYBRID,), "the pattern says which attention layers have"),
    Incompatible("linear_attention_freq", ON, (HYBRID,), "the pattern says which attention layers have"),
    Incompatible("use_rope_scaling", ON, (HYBRID,), "Megatron-LM does not scale rotary embeddings of hybrid models"),
    Incompatible("heterogeneous_layers_config_path", ON, (HYBRID,), "the pattern says what layers are"),
    Incompatible("heterogeneous_layers_config_encoded_json", ON, (HYBRID,), "the pattern says what layers are"),
    Incompatible("overlap_moe_expert_parallel_comm", ON, (HYBRID,),
                 "Megatron-LM only runs layers of GPT models in parts"),
    Incompatible("heterogeneous_layers_config_path", ON, (LAYERS,), _BUILDS),
    Incompatible("heterogeneous_layers_config_encoded_json", ON, (LAYERS,), _BUILDS),
    Incompatible("init_model_with_meta_device", ON, (LAYERS,), "layers that arrive are built on the device"),
    Incompatible("mtp_num_layers", ON, (RELEASE,), "layers of multi-token prediction cannot change their stage"),
    # Experts
    Incompatible("use_te_activation_func", ON, (EXPERTS,), _MODULES),
    Incompatible("mlp_chunks_for_training", other_than(1), (EXPERTS,),
                 "the tokens of a micro-batch then pass through the experts in several parts", "use 1"),
    Incompatible("use_transformer_engine_op_fuser", ON, (OWN_EXPERTS,), _TE_EXPERTS, _USE_TE_EXPERTS),
    Incompatible("moe_mlp_glu_interleave_size", ON, (OWN_EXPERTS,), _TE_EXPERTS, _USE_TE_EXPERTS),
    Incompatible("moe_single_grouped_weight", ON, (EXPERTS,),
                 "it keeps all experts in one weight, and replicas are further weights"),
    Incompatible("moe_single_grouped_bias", ON, (EXPERTS,),
                 "it keeps all experts in one bias, and replicas are further biases"),
    Incompatible("moe_pad_expert_input_to_capacity", ON, (EXPERTS,),
                 "it pads logical experts, and replicas would take the padding for tokens",
                 "use --moe-expert-capacity-factor without it"),
    Incompatible("moe_ncclep_static_shape", ON, (EXPERTS,), "it passes experts more rows than they have tokens"),
    Incompatible("moe_enable_echo", ON, (EXPERTS,), _OWN_BALANCER),
    Incompatible("moe_enable_scheduler", ON, (EXPERTS,), _OWN_BALANCER),
    Incompatible("moe_flex_dispatcher_backend", other_than("deepep", "hybridep", "ncclep"), (EXPERTS,), _OWN_BALANCER,
                 "use --moe-flex-dispatcher-backend deepep"),
    Incompatible("moe_flex_dispatcher_backend", one_of("ncclep"), (EXPERTS,),
                 "NCCL EP is started once, for one number of experts, and the repeated layer has no replicas",
                 "drop --mtp-use-repeated-layer or use --moe-flex-dispatcher-backend deepep",
                 {"moe_token_dispatcher_type": one_of("flex"), "mtp_num_layers": ON, "mtp_use_repeated_layer": ON}),
    Incompatible("moe_routing_trace_path", ON, (LAYERS,), "it records routers that a move replaces",
                 "use --balance-report", where=TRAINER),
    # Attention, positions and data
    Incompatible("attention_dropout", ON, (SEQUENCES, ATTENTION),
                 "it drops other attention scores than a run on one rank", "use --attention-dropout 0"),
    Incompatible("experimental_attention_variant", other_than("dsa"), (SEQUENCES,), _STATE),
    Incompatible("experimental_attention_variant", one_of("dsa"), (SEQUENCES, ATTENTION),
                 "it chooses keys by their scores among all keys of a document, and a rank has only pieces"),
    Incompatible("linear_attention_freq", ON, (SEQUENCES,), _STATE),
    Incompatible("attention_backend", other_than("auto", "flash", "fused"), (SEQUENCES,),
                 "it merges partial results of attention, which needs flash attention or cuDNN's",
                 "use auto, flash or fused"),
    Incompatible("apply_query_key_layer_scaling", ON, (ATTENTION,), "balanced attention does not scale by layer",
                 where=LOOPS),
    Incompatible("qk_clip", ON, (SEQUENCES, ATTENTION), _LOGITS),
    Incompatible("log_max_attention_logit", ON, (SEQUENCES,), _LOGITS),
    Incompatible("position_embedding_type", other_than("learned_absolute", "rope", "yarn", "none"), (SEQUENCES,),
                 "it does not count positions from the beginning of a document",
                 "use --position-embedding-type rope"),
    Incompatible("reset_attention_mask", ON, (SEQUENCES,), "it makes a dense mask",
                 "use --dataloader-inter-document-masking instead"),
    Incompatible("hybrid_context_parallel", ON, (SEQUENCES,), "it splits batches in its own way"),
    Incompatible("hybrid_context_parallel", ON, (RELEASE,), "its process groups cannot shrink yet"),
    Incompatible("dataloader_type", other_than("single"), (SEQUENCES_OF_DATA, SEQUENCES_OF_STEP),
                 "it gives data-parallel ranks samples in an order of its own", "use --dataloader-type single"),
    Incompatible("rampup_batch_size", ON, (SEQUENCES_OF_STEP,), _STEPS),
    Incompatible("step_batch_size_schedule", ON, (SEQUENCES_OF_STEP,), _STEPS),
    Incompatible("decrease_batch_size_if_needed", ON, (SEQUENCES_OF_STEP,), _STEPS),
    Incompatible("full_validation", ON, (SEQUENCES_OF_DATA,),
                 "data-parallel ranks may have different numbers of validation samples", "use --eval-iters"),
    Incompatible("fim_data", ON, (SEQUENCES_OF_DATA, SEQUENCES_OF_STEP),
                 "its permutations depend on the samples that a rank has read before"),
    Incompatible("moe_expert_capacity_factor", ON, (SEQUENCES,), _DROPS),
    Incompatible("moe_expert_rank_capacity_factor", ON, (SEQUENCES_OF_DATA, SEQUENCES_OF_STEP), _DROPS),
    Incompatible("mlp_chunks_for_training", other_than(1), (SEQUENCES,),
                 "the tokens of a micro-batch then pass through the routers in several parts", "use 1",
                 {"num_experts": ON}),
    Incompatible("moe_z_loss_coeff", ON, (SEQUENCES,), _PADDING, only_with={"sft": ON, "num_experts": ON}),
    Incompatible("moe_aux_loss_coeff", ON, (SEQUENCES,), _PADDING, only_with={"sft": ON, "num_experts": ON}),
    Incompatible("moe_router_enable_expert_bias", ON, (SEQUENCES,), _PADDING, only_with={"sft": ON, "num_experts": ON}),
    Incompatible("moe_router_load_balancing_type", one_of("sinkhorn"), (SEQUENCES,),
                 "it routes a token by the others on its rank", "use aux_loss", {"num_experts": ON}),
    Incompatible("moe_router_load_balancing_type", one_of("quantile_balancing"),
                 (SEQUENCES_OF_DATA, SEQUENCES_OF_STEP), "it takes quantiles over the tokens of a rank", "use aux_loss",
                 {"num_experts": ON}),
    Incompatible("moe_router_load_balancing_type", one_of("quantile_balancing"), (SEQUENCES,), _PADDING, "use aux_loss",
                 {"sft": ON, "num_experts": ON}),
    Incompatible("logits_save_dir", ON, (SEQUENCES,), "it names tokens by their rank and row, which change",
                 where=TRAINER),
    Incompatible("gtp_weight_remat_size", other_than(1), (SEQUENCES_OF_DATA,),
                 "its ranks have other micro-batches, in addition to data-parallel ranks"),
    # Weight gradients that wait
    Incompatible("transformer_impl", other_than("local", "transformer_engine"), (FILL,),
                 "its linear layers compute weight gradients in their backward passes",
                 "use --transformer-impl transformer_engine"),
    Incompatible("use_transformer_engine_op_fuser", ON, (FILL,),
                 "its fused products compute weight gradients in their backward passes"),
    Incompatible("use_grouped_gemm_for_shared_expert", ON, (FILL,),
                 "its fused products compute weight gradients in their backward passes"),
    Incompatible("experimental_attention_variant", one_of("dsa"), (FILL,),
                 "it multiplies by weights of modules that are not called, which then lose their gradients"),
    Incompatible("tp_comm_overlap", ON, (FILL,), "its messages overlap the computation of weight gradients"),
    Incompatible("overlap_dispatch_backward_with_experts_wgrad", ON, (FILL,),
                 "both decide when weight gradients are computed"),
    Incompatible("overlap_moe_expert_parallel_comm", ON, (FILL,), "it alternates parts of two passes"),
    Incompatible("delay_wgrad_compute", ON, (FILL,), "both decide when weight gradients are computed"),
    Incompatible("defer_embedding_wgrad_compute", ON, (FILL,), "both decide when weight gradients are computed"),
    Incompatible("use_ring_exchange_p2p", ON, (FILL,), "its messages cannot be waited for later"),
    Incompatible("use_megatron_fsdp", ON, (FILL,), "it shards the parameters of a layer over ranks",
                 "use --use-distributed-optimizer"),
    Incompatible("use_torch_fsdp2", ON, (FILL,), "it shards the parameters of a layer over ranks",
                 "use --use-distributed-optimizer"),
    Incompatible("gtp_weight_remat_size", other_than(1), (FILL,), "it gathers weights again for their gradients"),
    Incompatible("cuda_graph_impl", other_than("none"), (FILL,), _GRAPH, "use --cuda-graph-impl none"),
    Incompatible("enable_cuda_graph", ON, (FILL,), _GRAPH),
    Incompatible("external_cuda_graph", ON, (FILL,), _GRAPH),
    # Late copies of experts
    Incompatible("overlap_moe_expert_parallel_comm", ON, (LATE,), "it alternates two passes, which share late slots"),
    Incompatible("delay_wgrad_compute", ON, (LATE,), _LATER),
    Incompatible("fill_with_weight_gradients", ON, (LATE,), _LATER, where=TRAINER),
    Incompatible("moe_token_dispatcher_type", one_of("flex"), (LATE,), "its host does not know the load of a pass",
                 "use --moe-token-dispatcher-type alltoall"),
    Incompatible("fp8", ON, (LATE,), "weights that change from pass to pass would be quantized anew", "use --bf16"),
    Incompatible("fp4", ON, (LATE,), "weights that change from pass to pass would be quantized anew", "use --bf16"),
    Incompatible("cuda_graph_impl", other_than("none"), (LATE,), "a graph repeats the copies that it captured",
                 "use --cuda-graph-impl none"),
    # Parallelism and overlaps
    Incompatible("use_tp_pp_dp_mapping", ON, (RELEASE,), "it spreads each stage over all nodes, so no node is freed"),
    Incompatible("use_megatron_fsdp", ON, (EXPERTS, LAYERS),
                 "it shards the parameters of a layer over ranks", "use --use-distributed-optimizer"),
    Incompatible("use_torch_fsdp2", ON, (EXPERTS, LAYERS),
                 "it shards the parameters of a layer over ranks", "use --use-distributed-optimizer", where=TRAINER),
    Incompatible("use_megatron_fsdp", ON, (SEQUENCES,), "the two were never tested together",
                 "use --use-distributed-optimizer"),
    Incompatible("use_torch_fsdp2", ON, (SEQUENCES,), "the two were never tested together",
                 "use --use-distributed-optimizer"),
    Incompatible("gtp_weight_remat_size", other_than(1), (LAYERS,),
                 "a move does not support the way it shards weights"),
    Incompatible("expert_gtp_weight_remat_size", other_than(1), (EXPERTS, LAYERS, FILL),
                 "ranks hold parts of the weights of experts, and gather them for each product"),
    Incompatible("dsa_indexer_topk_freq", other_than(1), (LAYERS,),
                 "a layer uses the choice of keys of an earlier layer, which must stay on its stage", "use 1"),
    Incompatible("overlap_dispatch_backward_with_experts_wgrad", ON, (EXPERTS,),
                 "Megatron-LM reduces gradients of experts before it has computed them, unless --delay-wgrad-compute "
                 "is given",
                 "use --overlap-moe-expert-parallel-comm --delay-wgrad-compute"),
    Incompatible("overlap_param_gather_with_optimizer_step", ON, (EXPERTS, LAYERS), _IN_PARTS,
                 "use --overlap-param-gather alone", switches_off=True),
    Incompatible("nccl_ub", ON, (LAYERS,), "it registers buffers that a move replaces"),
    # Memory, precision and graphs
    Incompatible("bf16", ON, (FP64,), "a run has one precision", "drop one of them"),
    Incompatible("fp16", ON, (FP64,), "a run has one precision", "drop one of them"),
    Incompatible("accumulate_allreduce_grads_in_fp32", ON, (FP64,), "gradients are added up in float64"),
    Incompatible("transformer_impl", one_of("transformer_engine"), (FP64,), "it has no kernels for float64",
                 "use --transformer-impl local or drop --fp64"),
    Incompatible("fp8", ON, (OWN_EXPERTS,), _TE_EXPERTS, "add --moe-grouped-gemm, or use --bf16"),
    Incompatible("fp8_recipe", one_of("delayed"), (EXPERTS,),
                 "scales depend on the history of an expert's tokens, which are on several ranks",
                 "use --fp8-recipe tensorwise, blockwise or mxfp8", {"fp8": ON}),
    Incompatible("fp8_recipe", other_than("delayed", "tensorwise", "blockwise", "mxfp8"), (EXPERTS,),
                 "it is not known how it stores weights", "use --fp8-recipe tensorwise, blockwise or mxfp8",
                 {"fp8": ON}),
    Incompatible("first_last_layers_bf16", ON, (EXPERTS,), _MIXED, "drop it, or --fp8-param-gather",
                 {"fp8": ON, "fp8_param_gather": ON}),
    Incompatible("te_precision_config_file", ON, (EXPERTS,), _MIXED, "drop it, or --fp8-param-gather",
                 {"fp8": ON, "fp8_param_gather": ON}, TRAINER),
    Incompatible("te_precision_config_file", ON, (LAYERS,),
                 "it chooses layers by their place in a stage, which changes", where=TRAINER),
    *(Incompatible(f"save_{what}_interval", ON, (EXPERTS,), "it would save what experts compute beside their replicas",
                   "use --balance-report")
      for what in ("tokens_per_expert", "activations", "dgrads")),
    Incompatible("fp4", ON, (OWN_EXPERTS,), _TE_EXPERTS, "add --moe-grouped-gemm, or use --bf16"),
    Incompatible("fp4_param_gather", ON, (EXPERTS, LAYERS), _PACKED, only_with={"fp4": ON}, switches_off=True),
    Incompatible("fp4_recipe", other_than("nvfp4"), (EXPERTS, LAYERS), "it is not known how it quantizes",
                 "use --fp4-recipe nvfp4", {"fp4": ON}),
    Incompatible("moe_single_grouped_weight", ON, (LAYERS,),
                 "it stores experts in one tensor, which a move does not support"),
    Incompatible("moe_single_grouped_bias", ON, (LAYERS,),
                 "it stores biases of experts in one tensor, which a move does not support"),
    Incompatible("use_transformer_engine_op_fuser", ON, (LAYERS,),
                 "fused operations keep the scales of delayed scaling where a move does not find them",
                 "use --fp8-recipe tensorwise, blockwise or mxfp8", {"fp8": ON, "fp8_recipe": one_of("delayed")}),
    Incompatible("fine_grained_activation_offloading", ON, (RELEASE,),
                 "it fails on a stage with one layer, which a shorter pipeline may have"),
    Incompatible("fine_grained_activation_offloading", ON, (EXPERTS,),
                 "replicas are untested with it in CUDA graphs", "use --cuda-graph-impl none",
                 {"cuda_graph_impl": other_than("none")}, TRAINER),
    Incompatible("fine_grained_activation_offloading", ON, (LAYERS,),
                 "a move restarts it, but a CUDA graph holds its streams", "use --cuda-graph-impl none",
                 {"cuda_graph_impl": other_than("none")}, TRAINER),
    Incompatible("cpu_offloading_num_layers", ON, (LAYERS,), _COUNTS),
    Incompatible("cuda_graph_impl", other_than("none"), (SEQUENCES,), _PLANS, where=TRAINER, switches_off=True),
    Incompatible("external_cuda_graph", ON, (SEQUENCES,), _PLANS, where=TRAINER, switches_off=True),
    Incompatible("cuda_graph_impl", other_than("none"), (LAYERS,),
                 "layers of hybrid models cannot be captured again after a move", "use --cuda-graph-impl none",
                 {"hybrid_layer_pattern": ON}, TRAINER),
    Incompatible("cuda_graph_impl", other_than("none"), (RELEASE,), "its graphs hold process groups that shrink",
                 "use --cuda-graph-impl none"),
    Incompatible("enable_cuda_graph", ON, (*_BALANCERS, RELEASE), _GRAPH, where=TRAINER),
    Incompatible("external_cuda_graph", ON, (RELEASE,), _GRAPH),
    Incompatible("cuda_graph_impl", other_than("none"), (EXPERTS, ATTENTION, LAYERS), _CAPTURED,
                 "use --cuda-graph-impl none", where=LOOPS),
    Incompatible("enable_cuda_graph", ON, (EXPERTS, ATTENTION, LAYERS), _CAPTURED, where=LOOPS),
    Incompatible("external_cuda_graph", ON, (EXPERTS, ATTENTION, LAYERS), _CAPTURED, where=LOOPS),
    Incompatible("optimizer_cuda_graph", ON, (LAYERS,), "the graph belongs to an optimizer that a move replaces"),
    # The optimizer, checkpoints and the job
    Incompatible("optimizer", other_than("adam", "sgd", "muon", "dist_muon", "lion", "adaptive_muon"), (LAYERS,),
                 "it keeps matrices that do not have the shape of a weight, which a move does not support",
                 "use --optimizer muon"),
    Incompatible("optimizer", one_of("adaptive_muon"), (LAYERS,),
                 "Megatron-LM 0.19.2 cannot run it with emerging-optimizers 0.3.0, so no move was tried",
                 "use --optimizer muon"),
    Incompatible("optimizer_cpu_offload", ON, (LAYERS,), "it keeps optimizer state on the host",
                 "use --use-distributed-optimizer to save memory"),
    Incompatible("main_params_dtype", other_than("fp32"), (LAYERS,), _SCALES, "use --main-params-dtype fp32"),
    Incompatible("exp_avg_dtype", other_than("fp32", "bf16"), (LAYERS,), _SCALES, "use --exp-avg-dtype bf16"),
    Incompatible("exp_avg_sq_dtype", other_than("fp32", "bf16"), (LAYERS,), _SCALES, "use --exp-avg-sq-dtype bf16"),
    Incompatible("num_distributed_optimizer_instances", other_than(1), (RELEASE,),
                 "the optimizer's groups cannot shrink yet"),
    Incompatible("non_persistent_ckpt_type", other_than("global", "in_memory"), (LAYERS,),
                 "it saves state by rank, and layers change ranks", "use --non-persistent-ckpt-type global"),
    Incompatible("async_save", ON, (RELEASE,), "ranks may leave before a checkpoint is complete"),
    Incompatible("ckpt_format", other_than("torch_dist"), (LAYERS,),
                 "it would save layers by the rank that happens to have them", "use --ckpt-format torch_dist",
                 {"save": ON}),
    Incompatible("ckpt_assume_constant_structure", ON, (LAYERS,),
                 "it saves by the plan of the first save, and layers change ranks"),
    Incompatible("wandb_project", ON, (RELEASE,), "the rank that writes it leaves", "use --tensorboard-dir"),
    Incompatible("enable_ft_package", ON, (RELEASE,), _LEAVE),
    Incompatible("inprocess_restart", ON, (*_BALANCERS, RELEASE), "balanced training does not restart in its process",
                 "use torchrun --max-restarts", where=TRAINER),
)  # fmt: skip

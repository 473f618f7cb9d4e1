"""`--balance-dry-run`: describe a run without starting it.

Without a launcher, a dry run assumes another machine: WORLD_SIZE ranks, each with a Blackwell GPU and Transformer
Engine. Flags are parsed and validated as on that machine. Nothing is allocated and no process group is created. With
`--device cpu` the assumed ranks have CPUs and the packages of this machine. Under a launcher, a dry run describes the
ranks that were started.

Megatron-LM asks for a device and for packages while it validates flags. `megatron.balanced.cpu.device` answers for the
device, `assume_ranks` and `assume_packages` for the rest.
"""

import argparse
import importlib
import importlib.util
import os
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from balancing.experts.engine.slots import ReplicaSlots
from balancing.launch import detect_launch
from balancing.pipeline.pattern import read_pattern
from balancing.sequences.planners.groups import number_of_groups
from megatron.balanced.cpu.device import use_cpu
from megatron.balanced.trainer.config import BalanceConfig, cluster_from_flags
from megatron.balanced.trainer.sequence_rules import mamba_heads

__all__ = [
    "assume_packages",
    "assume_ranks",
    "assumed_device",
    "assumes_gpus",
    "groups_along",
    "is_available",
    "model_of",
    "moe_layers",
    "plan_lines",
    "slot_bytes",
]

_CAPABILITY = (10, 0)  # of the assumed GPUs: Blackwell, which has every number format
_TRANSFORMER_ENGINE = "2.14.0"  # the version of NVIDIA's recipes
_RANKS_PER_NODE = 8

# Functions of Transformer Engine that Megatron-LM, or this package, looks for while flags are validated.
_LOOKED_FOR = {
    "megatron.core.transformer.moe.moe_utils": (
        "fused_permute",
        "fused_permute_with_probs",
        "fused_sort_chunks_by_index",
        "fused_sort_chunks_by_index_with_probs",
        "fused_topk_with_score_function",
        "fused_unpermute",
    ),
    "megatron.core.models.common.embeddings.rope_utils": ("fused_apply_rotary_pos_emb",),
}

# What a forecast assumes, by names of balancing_tools.whatif: the document lengths of a public long-context data set,
# and expert skew measured on real text.
_LENGTHS, _ROUTING = "prolong", "dodoco-mha"

_assumed = False


def assumes_gpus() -> bool:
    """Whether this process is a dry run for GPUs that it does not have."""
    return _assumed


def is_available(package: str) -> bool:
    """Whether ranks can import `package`. A dry run for other machines assumes so."""
    return _assumed or importlib.util.find_spec(package) is not None


def assume_ranks(argv: Sequence[str]) -> bool:
    """Begin a dry run for other machines if `argv` and the environment ask for one, before Megatron-LM is imported.

    Sets the environment of rank 0 of WORLD_SIZE, and assumes GPUs unless `argv` has --device cpu. Returns whether it
    assumes GPUs. Raises ValueError for a WORLD_SIZE that is not a number of at least 1.
    """
    global _assumed
    asked = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    asked.add_argument("--balance-dry-run", action="store_true")
    asked.add_argument("--device", default="auto")
    given = asked.parse_known_args(argv)[0]
    if not given.balance_dry_run or "RANK" in os.environ:
        return False
    given_ranks = os.environ.pop("WORLD_SIZE", "1")  # removed, since nothing else could read a bad value
    if not given_ranks.isdecimal() or int(given_ranks) < 1:
        raise ValueError(f"WORLD_SIZE {given_ranks} is not a number of ranks; give 1 or more")
    ranks = int(given_ranks)
    node = next(size for size in range(_RANKS_PER_NODE, 0, -1) if ranks % size == 0)
    os.environ.setdefault("LOCAL_WORLD_SIZE", str(node))
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(ranks)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)  # there are no other ranks to share a report of errors with
    # On GPUs before Blackwell, Megatron-LM requires the value 1 in layouts with overlap. Job scripts set it.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    if given.device == "cpu":
        return False
    use_cpu()
    torch.cuda.get_device_capability = lambda device=None: _CAPABILITY
    _assumed = True
    return True


def assumed_device() -> str:
    """The assumed machines, in words."""
    launch = detect_launch()
    capability = ".".join(map(str, _CAPABILITY))
    return (
        f"a GPU of compute capability {capability} and Transformer Engine {_TRANSFORMER_ENGINE} on each of "
        f"{launch.world_size} rank(s), {launch.ranks_per_node} a node; all assumed"
    )


def assume_packages() -> None:
    """Let Megatron-LM, which is imported here, find the packages of the assumed machine."""
    from megatron.core import utils
    from packaging.version import Version

    utils._te_version = Version(_TRANSFORMER_ENGINE)
    for module, names in _LOOKED_FOR.items():
        owner = importlib.import_module(module)
        for name in names:
            if getattr(owner, name) is None:
                setattr(owner, name, _never_called)


def _never_called(*args: Any, **kwargs: Any) -> None:
    raise AssertionError("a dry run computes nothing")


def model_of(args: argparse.Namespace) -> Any:
    """Megatron-LM's config of the model that `args` describe. Raises ValueError or AssertionError if it refuses them.

    A vocabulary size that only the tokenizer knows is arbitrary here.
    """
    from megatron.training.argument_utils import gpt_config_from_args, hybrid_config_from_args

    args = argparse.Namespace(**vars(args))
    if args.padded_vocab_size is None and args.vocab_size is None:
        args.vocab_size = args.make_vocab_size_divisible_by
    return gpt_config_from_args(args) if args.hybrid_layer_pattern is None else hybrid_config_from_args(args)


# What would be planned.


def plan_lines(args: argparse.Namespace, config: BalanceConfig, frozen: int | None = 0) -> list[str]:
    """For each balancer that is on: the ranks that plan together, and the memory of replica slots on a rank.

    args: validated by Megatron-LM.
    frozen: layers at the front that end up frozen; None for a model that changes in another way.
    """
    lines = []
    if config.experts.enabled:
        lines.append(_scope("--balance-experts", "expert-parallel", groups_along(args, "ep", for_experts=True)))
        lines += _slot_lines(args, config)
    if config.sequences.enabled:
        shared = {"context": ("context-parallel", "cp"), "data": ("data-parallel", "dp-cp")}
        kind, axes = shared[config.sequences.domain]
        groups = groups_along(args, axes)
        if kind == "data-parallel":  # a large domain plans in groups
            size = len(groups[0]) // number_of_groups(args.data_parallel_size)
            groups = [ranks[first : first + size] for ranks in groups for first in range(0, len(ranks), size)]
        lines.append(_scope("--balance-sequences", kind, groups))
        lines += _state_lines(args, len(groups[0]))
    if config.layers.enabled:
        flag = "--balance-layers-once" if config.layers.once else "--balance-layers"
        pipelines = groups_along(args, "pp")
        several = "s" if len(pipelines) > 1 else ""
        lines.append(
            f"plan   {flag}: all {args.world_size} ranks make one plan; layers move along {len(pipelines)} "
            f"pipeline{several} of {len(pipelines[0])} ranks, the first of {_named(pipelines[0])}"
        )
        lines += _kind_lines(args)
    return [*lines, *_gain_lines(args, config, frozen)] if lines else ["plan   no balancer is on"]


def _kind_lines(args: argparse.Namespace) -> list[str]:
    """Which layers of a hybrid model move, and the segments at the start."""
    if args.hybrid_layer_pattern is None:
        return []
    pattern = read_pattern(args.hybrid_layer_pattern)
    ends = args.decoder_first_pipeline_num_layers, args.decoder_last_pipeline_num_layers
    plan = pattern.plan(args.pipeline_model_parallel_size, first=ends[0], last=ends[1])
    kinds = ", ".join(f"{pattern.kinds.count(kind)} {kind}" for kind in dict.fromkeys(pattern.kinds))
    return [f"plan   --balance-layers: moves {kinds} layers one by one, starting from {pattern.text(plan)}"]


def _state_lines(args: argparse.Namespace, ranks: int) -> list[str]:
    """How Mamba layers, which need whole documents, divide the work of documents that `ranks` ranks share."""
    layers = args.hybrid_layer_pattern and read_pattern(args.hybrid_layer_pattern).symbols.count("M")
    if not layers:
        return []
    heads = mamba_heads(args) // args.tensor_model_parallel_size // ranks
    return [
        f"plan   --balance-sequences: {layers} Mamba layers (M) see whole documents, with {heads} heads of all tokens "
        f"on each of {ranks} ranks"
    ]


def _gain_lines(args: argparse.Namespace, config: BalanceConfig, frozen: int | None) -> list[str]:
    """What balancing would save, where `--cluster` says how fast the machine is."""
    from balancing_tools.whatif.forecast import forecast, verdict, when_shorter  # runs that train do not need these
    from balancing_tools.whatif.job import flag_table, read_recipe_flags
    from megatron.balanced.trainer.kernels import with_planned_kernel

    cluster = cluster_from_flags(config, args.world_size)
    if cluster is None:
        return ["gain   not forecast without --cluster, which says how fast the machine is"]
    cluster = with_planned_kernel(cluster, config.sequences, assumes_gpus=assumes_gpus())
    if frozen is None:
        return ["gain   not forecast: the model changes while it trains; --balance-report measures the gain"]
    layers = config.layers
    packed = bool(args.sft or args.dataloader_inter_document_masking)
    try:
        flags = _flags_of(args, vars(flag_table().parse_known_args([])[0])) | {"freeze_layers": frozen}
        job = read_recipe_flags(flags).on(args.world_size)
        found = forecast(job, cluster, lengths=_LENGTHS if packed else None, routing=_ROUTING)
    except ValueError as error:
        return [f"gain   not forecast: {error}"]
    memory = max(one.memory or 0.0 for one in found)
    taken = [f"documents as in {_LENGTHS}"] * packed + [f"routing as in {_ROUTING}"] * bool(args.num_experts)
    taken += [f"{frozen} of {args.num_layers} layers frozen"] * bool(frozen)
    lines = [f"gain   {verdict(found)}"]
    if layers.repack_throughput_floor is not None:
        shorter = when_shorter(job, cluster, layers.repack_throughput_floor, layers.repack_min_stages)
        lines.append(f"gain   {shorter}")
    return [
        *lines,
        f"memory about {memory / 1e9:,.0f} GB of {cluster.memory / 1e9:,.0f} GB on the fullest rank",
        f"       a forecast for --cluster {config.cluster}{''.join(f', {each}' for each in taken)}; "
        "python -m balancing.whatif shows the table",
    ]


def _flags_of(args: argparse.Namespace, names: Iterable[str]) -> dict[str, Any]:
    """The values after validation of the flags `names`, which a forecast reads."""
    values = {name: getattr(args, name, None) for name in names}
    values |= {"fp8_format": args.fp8, "attention_backend": args.attention_backend.name}
    values["microbatch_group_size_per_virtual_pipeline_stage"] = args.microbatch_group_size_per_vp_stage
    layout = values["pipeline_model_parallel_layout"]
    values["pipeline_model_parallel_layout"] = getattr(layout, "input_data", layout)
    if isinstance(values["moe_layer_freq"], list):
        values["moe_layer_freq"] = str(values["moe_layer_freq"])
    return values


def groups_along(args: argparse.Namespace, axis: str, *, for_experts: bool = False) -> list[list[int]]:
    """The process groups along an axis of Megatron-LM's layout, or along several: [group][place] -> rank."""
    from megatron.core.parallel_state import RankGenerator

    pipeline = args.pipeline_model_parallel_size
    if for_experts:
        sizes = {"tp": args.expert_tensor_parallel_size, "ep": args.expert_model_parallel_size, "cp": 1}
    else:
        sizes = {"tp": args.tensor_model_parallel_size, "ep": 1, "cp": args.context_parallel_size}
    data = args.world_size // (pipeline * sizes["tp"] * sizes["ep"] * sizes["cp"])
    order = "tp-cp-ep-pp-dp" if args.use_tp_pp_dp_mapping else "tp-cp-ep-dp-pp"
    return RankGenerator(**sizes, dp=data, pp=pipeline, order=order).get_ranks(axis)


def _scope(flag: str, kind: str, groups: list[list[int]]) -> str:
    per_node = detect_launch().ranks_per_node
    nodes = max(len({rank // per_node for rank in group}) for group in groups)
    span = f"{len(groups[0])} ranks on {nodes} node{'s' * (nodes > 1)}"
    if len(groups) == 1:
        return f"plan   {flag}: one {kind} group of {span}, {_named(groups[0])}"
    return (
        f"plan   {flag}: {len(groups)} {kind} groups of {span}, each with plans of its own; the first of "
        f"{_named(groups[0])}"
    )


def _named(ranks: Sequence[int]) -> str:
    """'ranks 0-7', 'ranks 0-56 in steps of 8'."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    step = ranks[1] - ranks[0]
    if list(ranks) != list(range(ranks[0], ranks[-1] + 1, step)):
        return f"ranks {', '.join(map(str, ranks))}"
    return f"ranks {ranks[0]}-{ranks[-1]}" + (f" in steps of {step}" if step > 1 else "")


def _slot_lines(args: argparse.Namespace, config: BalanceConfig) -> list[str]:
    experts, model = config.experts, model_of(args)
    layers = moe_layers(model)
    fewest, most = min(map(sum, layers)), max(map(sum, layers))
    lines = [
        f"slots  --expert-replica-slots {experts.replica_slots}: beside "
        f"{args.num_experts // args.expert_model_parallel_size} home expert(s), in each of the "
        f"{most if fewest == most else f'{fewest} to {most}'} MoE layer(s) of a rank"
    ]
    modes = ("resident", "shared") if experts.replica_mode == "auto" else (experts.replica_mode,)
    need = {
        mode: max(slot_bytes(model, chunks, experts.replica_slots, shared=mode == "shared") for chunks in layers)
        for mode in modes
    }
    size = ", or ".join(f"{need[mode] / 2**30:,.3f} GiB {mode}" for mode in modes)
    lines.append(f"memory experts.replica_mode {experts.replica_mode}: {size}, on the rank with the most")
    if experts.late_slots:
        late = max(slot_bytes(model, chunks, experts.late_slots, shared=True) for chunks in layers)
        lines.append(f"memory experts.late_slots {experts.late_slots}: {late / 2**30:,.3f} GiB more")
    return lines


def moe_layers(model: Any) -> list[list[int]]:
    """MoE layers that can have replicas: [stage][model chunk] -> their number.

    model: Megatron-LM's config.
    """
    from megatron.core.transformer.enums import LayerType
    from megatron.core.transformer.transformer_block import get_num_layers_to_build

    from megatron.balanced.shared.tail import moe_layers_in_tail, tail_chunk

    if getattr(model, "hybrid_layer_pattern", None) is not None:
        return _moe_layers_of_pattern(model)
    frequency = model.moe_layer_freq
    if isinstance(frequency, int):
        has_experts = [layer % frequency == 0 for layer in range(model.num_layers)]
    else:
        has_experts = [bool(number) for number in frequency]
    stages, chunks = model.pipeline_model_parallel_size, model.virtual_pipeline_model_parallel_size or 1
    layout = model.pipeline_model_parallel_layout
    chunk_of_tail = tail_chunk(model)
    counts = [[0] * chunks for _ in range(stages)]
    first = 0
    for chunk in range(chunks):
        for stage in range(stages):
            if layout is None:
                own = get_num_layers_to_build(model, vp_stage=chunk if chunks > 1 else None, pp_rank=stage)
            else:
                own = layout.layout[stage][chunk].count(LayerType.decoder)
            counts[stage][chunk] = sum(has_experts[first : first + own])
            first += own
    last, stage = divmod(stages * chunks - 1 if chunk_of_tail is None else chunk_of_tail, stages)
    counts[stage][last] += moe_layers_in_tail(model, has_experts[-1])
    return counts


def _moe_layers_of_pattern(model: Any) -> list[list[int]]:
    pattern = read_pattern(model.hybrid_layer_pattern)
    first, last = model.num_layers_in_first_pipeline_stage, model.num_layers_in_last_pipeline_stage
    plan = pattern.plan(model.pipeline_model_parallel_size, first=first, last=last)
    return [[len({*pattern.experts} & {*chunk}) for chunk in stage] for stage in plan.chunks]


def slot_bytes(model: Any, chunks: Sequence[int], slots: int, *, shared: bool) -> int:
    """Bytes of replica slots, with gradients, on one rank.

    model: Megatron-LM's config.
    chunks: [model chunk] -> MoE layers on that rank.
    slots: maximal number of replicas of a layer.
    shared: whether two buffers serve all layers of a chunk (four with `--overlap-moe-expert-parallel-comm`).
    """
    from megatron.balanced.experts.quantized_weights import copied_bytes

    ffn = model.moe_ffn_hidden_size // model.expert_tensor_parallel_size
    hidden = model.moe_latent_size or model.hidden_size
    wide = ffn * (2 if model.gated_linear_unit else 1)
    shapes = [(wide, hidden), (hidden, ffn)]
    if model.add_bias_linear:
        shapes += [(wide,), (hidden,)]
    expert = [torch.empty(shape, dtype=model.params_dtype, device="meta") for shape in shapes]
    copies = 0 if model.fp8_param else copied_bytes(model)  # 8-bit weights by row and by column take as much as 16-bit
    stored = {"copies": copies, "alternating": model.overlap_moe_expert_parallel_comm}
    return sum(
        ReplicaSlots.bytes_needed([[expert]] * layers, slots, shared=shared, **stored) for layers in chunks if layers
    )

"""Layers that cannot move as asked, found on the command line, with what would work instead.

A move takes a layer apart into tensors and builds it again elsewhere. Options that keep parts of a layer in places that
a move does not know, or that record what a stage computes, would give wrong numbers; they are refused.
"""

import argparse
import dataclasses

from balancing.layers.config import LayerConfig
from balancing.layers.layout import from_layout
from megatron.balanced.contradictions import Contradiction, refuse

__all__ = ["check_layers"]

_CONTRADICTIONS: tuple[Contradiction, ...] = (
    ("spec", (None,), "puts another model in the place of the one whose layers can move", "drop it"),
    ("mtp_num_layers", (None, 0), "adds layers that cannot move", "drop it"),
    ("hybrid_layer_pattern", (None,), "builds layers that cannot move yet", "drop it"),
    ("heterogeneous_layers_config_path", (None,), "builds layers that cannot move yet", "drop it"),
    ("heterogeneous_layers_config_encoded_json", (None,), "builds layers that cannot move yet", "drop it"),
    ("cuda_graph_impl", ("none",), "would replay layers that are gone", "use --cuda-graph-impl none"),
    ("enable_cuda_graph", (False,), "would replay layers that are gone", "drop it"),
    ("external_cuda_graph", (False,), "would replay layers that are gone", "drop it"),
    ("optimizer_cuda_graph", (False,), "would replay the step of an optimizer that is gone", "drop it"),
    ("use_megatron_fsdp", (False,), "splits layers over ranks", "use --use-distributed-optimizer"),
    ("use_torch_fsdp2", (False,), "splits layers over ranks", "use --use-distributed-optimizer"),
    ("fp8", (None,), "keeps scales that a move does not know", "use --bf16"),
    ("fp4", (None,), "keeps scales that a move does not know", "use --bf16"),
    ("optimizer", ("adam", "sgd"), "keeps state that a move does not know", "use --optimizer adam"),
    ("use_precision_aware_optimizer", (False,), "keeps main parameters where a move does not find them", "drop it"),
    ("optimizer_cpu_offload", (False,), "keeps state where a move does not find it", "use --use-distributed-optimizer"),
    ("use_mup", (False,), "gives parameters learning rates that a move does not know", "drop it"),
    (
        "overlap_param_gather_with_optimizer_step",
        (False,),
        "leaves weights unfinished when layers move",
        "use --overlap-param-gather alone",
    ),
    ("delay_wgrad_compute", (False,), "hangs gradients on modules that are replaced", "drop it"),
    ("overlap_moe_expert_parallel_comm", (False,), "runs a layer in parts", "drop it"),
    ("nccl_ub", (False,), "registers buffers that a move replaces", "drop it"),
    ("fine_grained_activation_offloading", (False,), "counts layers of a stage in advance", "drop it"),
    ("cpu_offloading_num_layers", (0, None), "counts layers of a stage in advance", "drop it"),
    ("gtp_weight_remat_size", (1, None), "splits weights in a way that a move does not know", "drop it"),
    ("init_model_with_meta_device", (False,), "is not done for layers that arrive", "drop it"),
    ("moe_routing_trace_path", (None,), "listens to routers that are replaced", "use --balance-report"),
    ("moe_use_upcycling", (False,), "builds the model twice", "upcycle in a run of its own"),
    ("non_persistent_ckpt_type", (None, "global", "in_memory"), "ties state to ranks", "use global"),
)

# Flags that contradict ranks that leave.
_CONTRADICT_RELEASE: tuple[Contradiction, ...] = (
    ("use_tp_pp_dp_mapping", (False,), "spreads stages over all nodes, so that none gets free", "drop it"),
    ("num_distributed_optimizer_instances", (1, None), "ties the optimizer to all ranks there are", "drop it"),
    ("async_save", (False,), "saves with ranks that may be gone", "drop it"),
    ("ckpt_assume_constant_structure", (False,), "saves what ranks had that may be gone", "drop it"),
    ("wandb_project", ("", None), "is written by a rank that leaves", "use --tensorboard-dir"),
    ("log_straggler", (False,), "counts ranks that leave", "use --balance-report"),
    ("enable_ft_package", (False,), "takes ranks that leave for dead", "drop it"),
    ("inprocess_restart", (False,), "takes ranks that leave for dead", "drop it"),
    ("dataloader_type", ("single", "cyclic", None), "may not read data on every stage", "use single"),
    ("hybrid_context_parallel", (False,), "makes groups that cannot shrink yet", "drop it"),
)


def check_layers(args: argparse.Namespace, layers: LayerConfig) -> tuple[LayerConfig, list[str]]:
    """How layers will be balanced, and what the user should know of it, one line each.

    To be called before Megatron validates `args`, of which the format of checkpoints may change. Where there is nothing
    to balance, balancing is switched off. Raises ValueError for what cannot be done.
    """
    if layers.repacks or layers.repack_min_stages > 1:
        _check_release(args, layers)
    if not layers.enabled:
        return layers, []
    if layers.balance_layers and layers.balance_layers_once:
        raise ValueError("--balance-layers goes on moving layers where --balance-layers-once stops; drop one of them")
    flag = "--balance-layers-once" if layers.balance_layers_once else "--balance-layers"
    stages, chunks = args.pipeline_model_parallel_size, _chunks(args)
    why = None
    if stages == 1:
        why = "--pipeline-model-parallel-size 1 has one stage"
    elif args.num_layers == stages * chunks and not layers.repacks:
        why = f"each of the {stages * chunks} pipeline stages has one layer"
    if why is not None:
        off = dataclasses.replace(layers, balance_layers=False, balance_layers_once=False)
        return off, [f"{flag} has nothing to balance: {why}"]
    refuse(args, flag, _CONTRADICTIONS)
    if chunks > 1 and layers.layer_planner in ("diffusion", "deepspeed"):
        raise ValueError(
            f"--layer-planner {layers.layer_planner} plans one chunk a stage, not {chunks}; use optimal or uniform"
        )
    if args.save and args.ckpt_format != "torch_dist":
        raise ValueError(
            f"{flag} with --ckpt-format {args.ckpt_format} would save layers by the rank that happens to have them; "
            "use --ckpt-format torch_dist"
        )
    notes = []
    if args.save and args.use_distributed_optimizer and not args.dist_ckpt_optim_fully_reshardable:
        args.dist_ckpt_optim_fully_reshardable = True
        notes.append(
            f"{flag} saves optimizer state so that any layout can load it: --dist-ckpt-optim-fully-reshardable"
        )
    if args.attention_dropout or args.hidden_dropout:
        notes.append(f"{flag} draws dropout from a stream of each layer: masks differ from those of a run without it")
    return layers, notes


def _check_release(args: argparse.Namespace, layers: LayerConfig) -> None:
    """What was said of ranks that leave. Raises ValueError where there is nothing to release, or it cannot be done."""
    stages, chunks = args.pipeline_model_parallel_size, _chunks(args)
    asked = [name for name in ("repack_throughput_floor", "repack_memory_limit") if getattr(layers, name) is not None]
    if not asked:
        raise ValueError(
            f"--repack-min-stages {layers.repack_min_stages} releases nothing by itself; add --repack-throughput-floor"
        )
    flag = f"--{asked[0].replace('_', '-')} {getattr(layers, asked[0])}"
    if not layers.balance_layers:
        raise ValueError(f"{flag} needs measured layers that can move; add --balance-layers")
    if layers.repack_min_stages >= stages:
        raise ValueError(
            f"{flag} has nothing to release: --pipeline-model-parallel-size {stages} must be above --repack-min-stages "
            f"{layers.repack_min_stages}; use more stages, or drop it"
        )
    if chunks > 1:
        raise ValueError(f"{flag} can shrink a pipeline of one chunk a stage, not of {chunks}; use one")
    refuse(args, flag, _CONTRADICT_RELEASE)


def _chunks(args: argparse.Namespace) -> int:
    """Model chunks a rank, however they were asked for."""
    if args.num_virtual_stages_per_pipeline_rank:
        return args.num_virtual_stages_per_pipeline_rank
    if args.pipeline_model_parallel_layout:
        return len(from_layout(args.pipeline_model_parallel_layout, args.pipeline_model_parallel_size).chunks[0])
    if args.num_layers_per_virtual_pipeline_stage:
        return args.num_layers // args.pipeline_model_parallel_size // args.num_layers_per_virtual_pipeline_stage
    return 1

"""Checks of the flags of layer balancing, at start-up.

A move sends the tensors of a layer and builds the layer again on another stage. Flags that keep parts of a layer
outside of it, or that capture what a stage computes, would give wrong numbers after a move, so they are refused
(`megatron.balanced.shared.incompatible`).
"""

import argparse
import dataclasses

from balancing.layers.config import LayerConfig
from balancing.layers.plan import check_method, check_movable
from balancing.layers.repack import check_repack
from balancing.pipeline.layout import from_layout
from balancing.pipeline.pattern import read_pattern
from balancing.pipeline.stage_plan import StagePlan
from megatron.balanced.shared.captured_schedule import captures_iterations
from megatron.balanced.shared.incompatible import LAYERS, RELEASE, check_compatible, switch_off
from megatron.balanced.trainer.checks.graphs import captured_again, map_local_graphs

__all__ = ["check_layers"]


def check_layers(args: argparse.Namespace, layers: LayerConfig) -> tuple[LayerConfig, list[str]]:
    """Return the settings of layer balancing in force, and notes for the user, one line each.

    Called before Megatron validates `args`, and may set --dist-ckpt-optim-fully-reshardable. Balancing is switched off
    where there is nothing to balance. Raises ValueError for flags that cannot work.
    """
    if not layers.enabled:
        return layers, []
    stages, chunks = args.pipeline_model_parallel_size, _chunks(args)
    if shrinks := check_repack(layers, stages, chunks):
        check_compatible(args, RELEASE, shrinks)
    flag = "--balance-layers-once" if layers.once else "--balance-layers"
    why = None
    if args.skip_train:
        why = "--skip-train trains no step"
    elif stages == 1:
        why = "--pipeline-model-parallel-size 1 has one stage"
    elif args.num_layers == stages * chunks and _even(args) and not shrinks:
        why = f"each of the {stages * chunks} pipeline stages has one layer"
    if why is not None:
        off = dataclasses.replace(layers, enabled=False, once=False)
        return off, [f"{flag} has nothing to balance: {why}"]
    check_compatible(args, LAYERS, flag)
    try:
        check_method(layers.planner, chunks, behind=0)
        if (plan := _layout(args)) is not None:
            check_movable(plan, layers.planner)
    except ValueError as error:
        raise ValueError(f"{flag}: {error}") from error
    drops = args.attention_dropout or args.hidden_dropout
    if drops and (args.cuda_graph_impl != "none" or args.external_cuda_graph):
        raise ValueError(
            f"{flag} captures CUDA graphs again after a move, which is untested with dropout; use "
            "--attention-dropout 0 --hidden-dropout 0, or --cuda-graph-impl none"
        )
    if captures_iterations(args) and args.cuda_graph_warmup_steps < 2:
        raise ValueError(
            f"{flag} measures layers in iterations before the graph, without the first one, and "
            f"--cuda-graph-warmup-steps {args.cuda_graph_warmup_steps} leaves none; use 3"
        )
    notes = switch_off(args, LAYERS, flag)
    notes += map_local_graphs(args, flag, "Megatron-LM captures them once, and a move changes what they hold")
    if captures_iterations(args):
        interval, after = captured_again(args, layers.interval)
        layers = dataclasses.replace(layers, interval=interval)
        notes.append(
            f"{flag} with --cuda-graph-impl full_iteration measures layers in iterations without the graph, and "
            f"decides every {interval} iterations (--layer-balance-interval); after a move {after}"
        )
    if args.save and args.use_distributed_optimizer and not args.dist_ckpt_optim_fully_reshardable:
        args.dist_ckpt_optim_fully_reshardable = True
        notes.append(
            f"{flag} saves optimizer state so that any layout can load it: --dist-ckpt-optim-fully-reshardable"
        )
    if drops:
        notes.append(
            f"{flag} with dropout: masks differ after a move, and losses equal those without it only statistically"
        )
    return layers, notes


def _layout(args: argparse.Namespace) -> StagePlan | None:
    """The plan that the user gave; None if Megatron-LM divides layers evenly."""
    if args.hybrid_layer_pattern:
        ends = {"first": args.decoder_first_pipeline_num_layers, "last": args.decoder_last_pipeline_num_layers}
        return read_pattern(args.hybrid_layer_pattern).plan(args.pipeline_model_parallel_size, **ends)
    if not args.pipeline_model_parallel_layout:
        return None
    return from_layout(args.pipeline_model_parallel_layout, args.pipeline_model_parallel_size)


def _even(args: argparse.Namespace) -> bool:
    """Whether all chunks begin with the same number of layers."""
    plan = _layout(args)
    accounted = args.account_for_embedding_in_pipeline_split or args.account_for_loss_in_pipeline_split
    return not accounted if plan is None else len(set(map(len, plan.order))) == 1


def _chunks(args: argparse.Namespace) -> int:
    """Model chunks of a rank, whichever flag sets them."""
    if args.num_virtual_stages_per_pipeline_rank:
        return args.num_virtual_stages_per_pipeline_rank
    if (plan := _layout(args)) is not None:
        return plan.virtual
    if args.num_layers_per_virtual_pipeline_stage:
        ends = args.account_for_embedding_in_pipeline_split, args.account_for_loss_in_pipeline_split
        units = args.num_layers + sum(map(bool, ends))
        return units // args.pipeline_model_parallel_size // args.num_layers_per_virtual_pipeline_stage
    return 1

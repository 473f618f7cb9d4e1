"""Checks of `--fill-with-weight-gradients` at start-up, and whether `--balance all` switches it on."""

import argparse
import dataclasses

import numpy as np

from balancing.layers.cost import LayerSeconds
from balancing.layers.simulated_fill import weight_share
from balancing.pipeline.schedule import Schedule
from balancing.pipeline.stage_plan import StagePlan
from megatron.balanced.shared.incompatible import FILL, check_compatible
from megatron.balanced.trainer.config import BalanceConfig

__all__ = ["check_fill", "deferred_share"]

_FLAG = "--fill-with-weight-gradients"
_WORTH = 0.03  # gain, as a share of a step, from which `--balance all` switches it on
_MOST = 16  # groups of micro-batches to simulate; with more, warm-up and cool-down are a smaller share of a step


def check_fill(args: argparse.Namespace, config: BalanceConfig) -> tuple[BalanceConfig, list[str]]:
    """Return the config with --fill-with-weight-gradients as it is in force, and notes for the user, one line each.

    `--balance all` switches it on if it works with the other flags and a simulated step of equal layers gets at least
    3 % shorter. Raises ValueError if the user gave it with a flag that is incompatible. Called after Megatron has
    validated `args`.
    """
    notes = []
    if not config.fill_with_weight_gradients:
        if "all" not in map(str.strip, (config.balance or "").split(",")):
            return config, []
        try:
            _check(args, config)
        except ValueError:
            return config, []
        if _idle(args) or (gain := _gain(args)) < _WORTH:
            return config, []
        config = dataclasses.replace(config, fill_with_weight_gradients=True)
        notes.append(f"--balance all switches on {_FLAG}: it makes a simulated step of equal layers {gain:.0%} shorter")
    elif why := _idle(args):
        return dataclasses.replace(config, fill_with_weight_gradients=False), [f"{_FLAG} has nothing to fill: {why}"]
    else:
        _check(args, config)
    from megatron.balanced.sequences.shape import latent_shape

    if args.transformer_impl != "local" and config.sequences.enabled and latent_shape(args) is not None:
        notes.append(
            f"{_FLAG} makes ranks send keys and values instead of latents, since weight gradients of latent "
            "projections are computed later"
        )
    return config, notes


def deferred_share(args: argparse.Namespace) -> float:
    """The share of a layer's backward seconds that is deferred."""
    return weight_share(recomputes=args.recompute_granularity == "full")


def _idle(args: argparse.Namespace) -> str | None:
    """Why no stage waits; None if some do."""
    if args.skip_train:
        return "--skip-train trains no step"
    return "with --pipeline-model-parallel-size 1 no stage waits" if args.pipeline_model_parallel_size == 1 else None


def _check(args: argparse.Namespace, config: BalanceConfig) -> None:
    """Raise ValueError for flags that are incompatible with --fill-with-weight-gradients."""
    check_compatible(args, FILL, _FLAG)
    if config.experts.enabled and config.experts.gemm == "torch":
        raise ValueError(f'{_FLAG} needs experts.gemm "megatron" or "auto": PyTorch\'s products defer no gradients')
    if args.gradient_accumulation_fusion and args.transformer_impl == "local":
        raise ValueError(
            f"{_FLAG} is incompatible with fused gradient accumulation, which adds weight gradients in backward "
            "passes; add --no-gradient-accumulation-fusion"
        )
    if config.layers.repacks:
        raise ValueError(
            f"{_FLAG} is incompatible with --repack-throughput-floor, which shortens the pipeline; drop one of them"
        )


def _gain(args: argparse.Namespace) -> float:
    """The share of a step of equal layers that filling saves, simulated with at most 16 micro-batches a stage."""
    stages, chunks = args.pipeline_model_parallel_size, args.virtual_pipeline_model_parallel_size or 1
    share = deferred_share(args)
    plain = Schedule(group=args.microbatch_group_size_per_vp_stage if chunks > 1 else None)
    filled = dataclasses.replace(plain, weight_share=share)
    samples = args.global_batch_size // (args.micro_batch_size * args.data_parallel_size)
    micro_batches = min(samples, _MOST * (plain.group or stages))
    plan, even = StagePlan.from_counts(((1,) * chunks,) * stages), np.ones(stages * chunks)
    cost = LayerSeconds(even, even / share)  # weight gradients take as long as a forward pass
    seconds = [cost.step_seconds(plan, micro_batches, schedule=schedule) for schedule in (plain, filled)]
    return 1 - seconds[1] / seconds[0]

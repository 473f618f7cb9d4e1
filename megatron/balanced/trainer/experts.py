"""Experts in Megatron-LM's trainer. Their flags are checked in `checks.experts`."""

import argparse
import dataclasses

from megatron.core.utils import get_model_config
from megatron.training.training import get_megatron_optimizer_config

from megatron.balanced.experts.balancer import ExpertBalancer
from megatron.balanced.experts.captured import CapturedExpertBalancer
from megatron.balanced.run import Run
from megatron.balanced.shared.captured_schedule import captures_iterations
from megatron.balanced.trainer.config import BalanceConfig

__all__ = ["experts"]

_GEMM = "balance_expert_gemm"  # of Megatron-LM's arguments, which checkpoints hold


def experts(run: Run, args: argparse.Namespace, config: BalanceConfig, resumed: argparse.Namespace | None) -> None:
    """Let the run balance experts. resumed: arguments in the checkpoint; None without one."""
    settings = config.experts
    if config.fill_with_weight_gradients:  # which Megatron-LM's linear layers leave out
        settings = dataclasses.replace(settings, gemm="megatron")

    def build(run: Run) -> ExpertBalancer:
        reserved = sum(callback.held().buffers for callback in run.callbacks)
        captures = captures_iterations(get_model_config(run.chunks[0]))
        kind = CapturedExpertBalancer if captures else ExpertBalancer
        balancer = kind(
            run.chunks,
            settings,
            job=run.job,
            cluster=run.cluster,
            report=run.report,
            reserved=reserved,
            optimizer=get_megatron_optimizer_config(args)[0],
            had_gemm=getattr(resumed, _GEMM, None),
        )
        setattr(args, _GEMM, balancer.gemm.recorded)
        return balancer

    run.build.append(build)

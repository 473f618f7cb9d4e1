"""Experts in Megatron-LM's trainer. Their flags are checked in `checks.experts`."""

from megatron.core.utils import get_model_config

from balancing.experts.config import ExpertConfig
from megatron.balanced.experts.balancer import ExpertBalancer
from megatron.balanced.experts.captured import CapturedExpertBalancer
from megatron.balanced.run import Run
from megatron.balanced.shared.captured_schedule import captures_iterations

__all__ = ["experts"]


def experts(run: Run, config: ExpertConfig) -> None:
    """Let the run balance experts."""

    def build(run: Run) -> ExpertBalancer:
        reserved = sum(callback.held().buffers for callback in run.callbacks)
        captures = captures_iterations(get_model_config(run.chunks[0]))
        kind = CapturedExpertBalancer if captures else ExpertBalancer
        return kind(run.chunks, config, job=run.job, cluster=run.cluster, report=run.report, reserved=reserved)

    run.build.append(build)

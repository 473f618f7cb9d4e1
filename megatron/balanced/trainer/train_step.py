"""Megatron-LM's `train_step`, as the loop's part of a step (`megatron.balanced.run.step`).

Megatron-LM has no callbacks. Its `train_step` is the one function that knows the iteration, the model, the optimizer
and the schedule while no micro-batch is in flight.
"""

import functools
from collections.abc import Callable
from typing import Any

from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.transformer.moe.paged_stash import PagedStashRunner

from megatron.balanced.run import Run, step

__all__ = ["with_callbacks"]


def with_callbacks(run: Run, original: Callable) -> Callable:
    """Megatron's `train_step` with the callbacks of `run` around it."""

    @functools.wraps(original)
    def train_step(
        forward_step_func: Callable,
        data_iterator: Any,
        model: Any,
        optimizer: Any,
        opt_param_scheduler: Any,
        config: Any,
        forward_backward_func: Callable,
        iteration: int | None = None,
        **groups: Any,
    ) -> Any:
        if isinstance(forward_backward_func, PagedStashRunner):
            forward_backward_func.prepare_for_rerun = functools.partial(_run_again, run, forward_backward_func)
        run.complete(optimizer, opt_param_scheduler)
        run.data, run.schedule = data_iterator, run.new_schedule or forward_backward_func
        run.iteration = run.next_step = iteration or 0
        run.micro_batches = get_num_microbatches()
        first = forward_step_func, data_iterator, model, optimizer, opt_param_scheduler, config
        return step(run, config, lambda schedule: original(*first, schedule, iteration=iteration, **groups))

    return train_step


def _run_again(run: Run, runner: PagedStashRunner, is_training: bool = True) -> None:
    """Replaces `runner.prepare_for_rerun`, which Megatron-LM calls between two runs of the schedule in one step."""
    run.end_schedule()
    PagedStashRunner.prepare_for_rerun(runner, is_training)
    run.begin_schedule()

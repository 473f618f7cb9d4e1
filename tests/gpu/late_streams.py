"""Streams that are late: what should wait for them and does not, reads what is not yet there.

A kernel that sleeps is queued where streams meet. On the "side" streams, at the beginning of what they are given to do:
the stream that training runs on finds their results missing unless it waits. On the "main" stream, before it waits and
before messages start: streams that should wait for it find its results missing.
"""

import sys
from collections.abc import Callable
from typing import Any

__all__ = ["make_late"]

_CYCLES = 2_000_000  # a millisecond or so, longer than any kernel of a small model

_MESSAGES = (
    "all_gather_into_tensor",
    "all_reduce",
    "all_to_all_single",
    "batch_isend_irecv",
    "broadcast",
    "reduce_scatter_tensor",
)


def _bound(function: Callable) -> list[tuple[Any, str]]:
    """Where a function of torch.distributed is looked up: there, and in modules of Megatron-LM and of this package that
    keep it under a name of their own, as `dist_all_gather_func`."""
    modules = [
        m for name, m in sys.modules.items() if name.startswith(("torch.distributed", "megatron.", "balancing."))
    ]
    return [(module, name) for module in modules for name, value in list(vars(module).items()) if value is function]


def make_late(which: str, told: Any) -> None:
    """Have the "side" streams or the "main" one be late from now on in this process. Counts in `told.late`."""
    import torch
    import torch.distributed as dist

    from balancing.messages import start_all_to_all
    from megatron.balanced.cpu.device import is_cpu

    assert which in ("side", "main")
    sleep = (lambda cycles: None) if is_cpu() else torch.cuda._sleep

    def is_late() -> bool:
        on_main = torch.cuda.current_stream() == torch.cuda.default_stream()
        return is_cpu() or on_main == (which == "main")

    def after_a_sleep(original: Callable) -> Callable:
        def late(*args: Any, **kwargs: Any) -> Any:
            if is_late():
                sleep(_CYCLES)
                told.late += 1
            return original(*args, **kwargs)

        return late

    for on_time in (*(getattr(dist, name) for name in _MESSAGES), start_all_to_all):
        late = after_a_sleep(on_time)
        for module, known in _bound(on_time):
            setattr(module, known, late)
    dist.Work.wait = after_a_sleep(dist.Work.wait)
    for name in ("wait_event", "wait_stream"):
        setattr(torch.cuda.Stream, name, after_a_sleep(getattr(torch.cuda.Stream, name)))
    if is_cpu():  # which has one stream
        return
    enter = torch.cuda.StreamContext.__enter__

    def entered(self: Any) -> Any:
        result = enter(self)
        if is_late():
            sleep(_CYCLES)
            told.late += 1
        return result

    torch.cuda.StreamContext.__enter__ = entered

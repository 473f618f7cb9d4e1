"""The CPU device with streams and events that remember who waits for whom, and noted operations.

Code that asks whether it is on a GPU (`is_cuda`, the backend "nccl") and then sends in another order is told yes.
"""

import functools
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from balancing.messages import runs_nccl
from megatron.balanced.cpu import device
from tests.support.checkers.device_log import COLLECTIVES, MESSAGES, DeviceLog

__all__ = ["install"]


def _make_classes(log: DeviceLog) -> tuple[type, type]:
    """Streams and events that keep clocks."""

    class Event(torch.cuda.Event):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__()
            self.id = log.new_event()

        def record(self, stream: Any = None) -> None:
            self._seconds = time.perf_counter()
            log.syncs.record_state(self.id, log.stream if stream is None else stream.stream_id)

        def wait(self, stream: Any = None) -> None:
            log.wait(log.stream if stream is None else stream.stream_id, log.syncs.recorded_sync_states[self.id])

        def synchronize(self) -> None:
            log.host_wait(log.syncs.recorded_sync_states[self.id])

    class Stream(torch.cuda.Stream):
        def __init__(self, *args: Any, stream_id: int | None = None, **kwargs: Any) -> None:
            log.streams_of_engine += stream_id is None and _asked_by_engine()
            self.stream_id = self.cuda_stream = log.new_stream() if stream_id is None else stream_id
            self._outer: list[int] = []

        def wait_stream(self, stream: Any) -> None:
            log.wait(self.stream_id, log.clock(stream.stream_id).copy())

        def wait_event(self, event: Any) -> None:
            event.wait(self)

        def record_event(self, event: Any = None) -> Any:
            event = event or Event()
            event.record(self)
            return event

        def synchronize(self) -> None:
            log.host_wait(log.clock(self.stream_id).copy())

        def __enter__(self) -> Any:
            self._outer.append(log.stream)
            log.stream = self.stream_id
            return self

        def __exit__(self, *exc: object) -> None:
            log.stream = self._outer.pop()

        def __eq__(self, other: object) -> bool:
            return isinstance(other, Stream) and other.stream_id == self.stream_id

        def __hash__(self) -> int:
            return self.stream_id

    return Stream, Event


def _asked_by_engine() -> bool:
    """Whether it is a balancer, or Transformer Engine, that asks where it runs."""
    frame = sys._getframe(2)
    if frame.f_code is runs_nccl.__code__ and frame.f_back is not None:  # asks for its caller
        frame = frame.f_back
    asking = frame.f_code.co_filename
    return "/balancing/" in asking or "/transformer_engine/pytorch/" in asking


def install() -> DeviceLog:
    """Note what this process does from now on, for good. To be called on the CPU device, before groups are made."""
    assert device.is_cpu()
    log = DeviceLog()
    Stream, Event = _make_classes(log)
    cuda = torch.cuda
    cuda.Stream = cuda.ExternalStream = Stream
    cuda.Event = Event
    cuda.current_stream = lambda device=None: Stream(stream_id=log.stream)
    cuda.default_stream = lambda device=None: Stream(stream_id=0)
    cuda.stream = lambda stream=None: Stream(stream_id=log.stream) if stream is None else stream
    cuda.set_stream = lambda stream: setattr(log, "stream", stream.stream_id)
    cuda.synchronize = lambda device=None: [
        log.host_wait(clock.copy()) for clock in list(log.syncs.current_sync_states.values())
    ]
    is_cuda, backend = torch.Tensor.is_cuda, dist.get_backend
    torch.Tensor.is_cuda = property(lambda tensor: _asked_by_engine() or is_cuda.__get__(tensor))
    dist.get_backend = lambda group=None: "nccl" if _asked_by_engine() else backend(group)
    for kind in (*COLLECTIVES, *MESSAGES):
        if (original := getattr(dist.ProcessGroup, kind, None)) is not None:
            setattr(dist.ProcessGroup, kind, _noted(log, kind, original))
    wait, is_completed = dist.Work.wait, dist.Work.is_completed
    batch, new_group, destroy = dist.batch_isend_irecv, dist.new_group, dist.destroy_process_group

    @functools.wraps(wait)
    def waited(work: dist.Work, *args: Any, **kwargs: Any) -> Any:
        return log.wait_for(work, lambda: wait(work, *args, **kwargs))

    @functools.wraps(is_completed)
    def completed(work: dist.Work) -> bool:
        if done := is_completed(work):
            log.completed(work)
        return done

    @functools.wraps(batch)
    def batch_isend_irecv(p2p_op_list: list[dist.P2POp]) -> list[dist.Work]:
        with log.batch(p2p_op_list):
            return batch(p2p_op_list)

    @functools.wraps(new_group)
    def made(ranks: Any = None, *args: Any, **kwargs: Any) -> Any:
        return log.new_group(ranks, lambda: new_group(ranks, *args, **kwargs), kwargs.get("backend") == "gloo")

    @functools.wraps(destroy)
    def destroyed(group: dist.ProcessGroup | None = None) -> None:
        log.destroy_group(group, lambda: destroy(group))

    dist.Work.wait, dist.Work.is_completed = waited, completed
    dist.batch_isend_irecv, dist.new_group, dist.destroy_process_group = batch_isend_irecv, made, destroyed
    return log


def _noted(log: DeviceLog, kind: str, original: Callable) -> Callable:
    note = log.message if kind in MESSAGES else log.collective

    @functools.wraps(original)
    def start(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
        given = (*args, *kwargs.values())
        if kind in MESSAGES and len(given) < 3:
            given = (*given, 0)
        return note(group, kind, given, lambda: original(group, *args, **kwargs))

    return start

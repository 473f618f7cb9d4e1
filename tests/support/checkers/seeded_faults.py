"""Faults that gloo forgives, planted in one rank's code at runtime.

A wait that is left out here still has gloo finish, as if the device had had the time: the numbers stay, and only the
checkers are not told of the wait.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from tests.support.checkers import small_jobs
from tests.support.checkers.device_log import DeviceLog

__all__ = ["FAULTS", "SMALL_JOBS", "Fault"]

SMALL_JOBS = {
    "slots, resident": ("slots", (False,)),
    "slots, shared": ("slots", (True,)),
    "ring": ("attention", ("ring", "same")),
    "gather": ("attention", ("gather", "same")),
    "gather, once a node": ("attention", ("gather", "same", 2)),
    "remap": ("attention", ("gather", "equal")),
    "layers": ("layers", ()),
    "buckets": ("buckets", ()),
    "exits": ("exits", ()),
    "release": ("release", ()),
}


@dataclass(frozen=True)
class Fault:
    """plant: called on each rank before the job. named: parts of the call sites that must be named together, in the
    finding of the replay or of the races."""

    job: str
    checker: str  # "order" or "races"
    plant: Callable[[DeviceLog, int], None]
    named: tuple[str, ...]


def _unheard(log: DeviceLog, function: Callable) -> Callable:
    """Waits within are not told to anybody."""

    def call(*args: Any, **kwargs: Any) -> Any:
        log.unheard += 1
        try:
            return function(*args, **kwargs)
        finally:
            log.unheard -= 1

    return call


def _slots_do_not_wait(log: DeviceLog, rank: int) -> None:
    from balancing.experts.engine.relay import Relay

    Relay.wait_received = _unheard(log, Relay.wait_received)


class _Instead:
    """A module with some of its names replaced."""

    def __init__(self, module: Any, **names: Any) -> None:
        self._module = module
        vars(self).update(names)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


class _Unheard:
    """A message; who waits for it is not told to anybody."""

    def __init__(self, log: DeviceLog, work: dist.Work) -> None:
        self.wait = _unheard(log, work.wait)


def _waits_unheard(log: DeviceLog) -> _Instead:
    return _Instead(
        dist, batch_isend_irecv=lambda batch: [_Unheard(log, work) for work in dist.batch_isend_irecv(batch)]
    )


def _relay_does_not_wait(log: DeviceLog, rank: int) -> None:
    """A message is added to before it has come."""
    from balancing.experts.engine import relay

    relay.dist = _waits_unheard(log)


def _attention_does_not_wait(log: DeviceLog, rank: int) -> None:
    from balancing.sequences.engine.attention import _Pass
    from balancing.sequences.engine.transport import Pending

    wait, run = Pending.wait, _Pass.steps

    def of_pass(self: Any, steps: Any) -> None:
        Pending.wait = _unheard(log, wait)
        try:
            run(self, steps)
        finally:
            Pending.wait = wait

    _Pass.steps = of_pass


def _remap_does_not_wait(log: DeviceLog, rank: int) -> None:
    from balancing.sequences.engine.attention import AttentionCall

    AttentionCall.change_layout = _unheard(log, AttentionCall.change_layout)


def _move_does_not_wait(log: DeviceLog, rank: int) -> None:
    from balancing.layers import transfer

    transfer.dist = _waits_unheard(log)


def _sends_swapped(log: DeviceLog, rank: int) -> None:
    """Two messages to one rank in another order than it expects them; gloo goes by their tags."""
    from balancing.experts.engine import relay

    def batch(operations: list[dist.P2POp]) -> list[Any]:
        return dist.batch_isend_irecv(operations[::-1] if rank == 0 else operations)

    relay.dist = _Instead(dist, batch_isend_irecv=batch)


def _bucket_sent_early(log: DeviceLog, rank: int) -> None:
    """Its reduction does not wait for the stream that makes its gradients."""
    from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup as Group

    start = Group.start_grad_sync

    def start_grad_sync(self: Any, *args: Any, **kwargs: Any) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            start(self, *args, **kwargs)

    Group.start_grad_sync = start_grad_sync


def _unbatched_pair(log: DeviceLog, rank: int) -> None:
    """Each rank first sends, by itself, and then receives."""
    from balancing.sequences.engine import transport

    def one_by_one(operations: list[dist.P2POp]) -> list[Any]:
        return [each.op(each.tensor, each.peer, each.group, each.tag) for each in operations[::-1]]

    transport.dist = _Instead(dist, batch_isend_irecv=one_by_one)


def _exits_received_late(log: DeviceLog, rank: int) -> None:
    """Exits are sent before the hidden states and received after them."""
    from examples.dynamic_models.token_skipping import Tokens

    expect, begin = Tokens._expect, Tokens._begin_chunk

    def begin_chunk(self: Any, block: Any, args: Any, kwargs: Any) -> None:
        expect(self)
        begin(self, block, args, kwargs)

    Tokens._expect, Tokens._begin_chunk = lambda self: None, begin_chunk


def _exits_by_themselves(log: DeviceLog, rank: int) -> None:
    """The stages connect for exits while one of them waits for hidden states."""
    from examples.dynamic_models.token_skipping import Tokens

    _exits_received_late(log, rank)
    Tokens._message = lambda self, kind, message, other: [kind(message, other, self._group)]


def _freed_buffer(log: DeviceLog, rank: int) -> None:
    """A relay that is still sending is forgotten."""
    from balancing.experts.engine.slots import ReplicaSlots

    ReplicaSlots._finish_sends = lambda self: self._leaving.clear()


def _slot_refilled_too_soon(log: DeviceLog, rank: int) -> None:
    """Weights come into a slot while the layer that had it may still compute."""
    from balancing.experts.engine import slots

    class Stream(torch.cuda.Stream):
        def wait_stream(self, stream: Any) -> None:
            pass

    slots.torch = _Instead(torch, cuda=_Instead(torch.cuda, Stream=Stream))


def _receive_too_large(log: DeviceLog, rank: int) -> None:
    from balancing.layers import transfer

    exact = transfer._bytes
    transfer._bytes = lambda parts: exact(parts) + 8


def _collective_on_one_rank(log: DeviceLog, rank: int) -> None:
    """The first rank alone reduces something in a group of all, at the end of its work."""
    job = small_jobs.layers

    def layers() -> Any:
        result = job()
        if rank == 0:
            dist.all_reduce(torch.zeros(1), async_op=True)
        return result

    small_jobs.layers = layers


def _communicators_crossed(log: DeviceLog, rank: int) -> None:
    """Two reductions of two groups of the same ranks, in another order on the first rank."""
    job = small_jobs.layers

    def layers() -> Any:
        result = job()
        groups = [dist.new_group() for _ in range(2)]
        for group in groups:
            dist.all_reduce(torch.zeros(1), group=group)
        works = [
            dist.all_reduce(torch.zeros(1), group=group, async_op=True)
            for group in (groups[::-1] if rank == 0 else groups)
        ]
        for work in works:
            work.wait()
        return result

    small_jobs.layers = layers


def _ranks_do_not_meet(log: DeviceLog, rank: int) -> None:
    """The first thing in a group is a message between two of its three ranks."""
    from balancing import messages

    messages.connect = lambda process_group, peers=None: None


def _sent_while_written(log: DeviceLog, rank: int) -> None:
    """Rows are packed on a stream that the message does not wait for."""
    from balancing.sequences.engine import transport

    outgoing = transport._outgoing

    def elsewhere(exchange: Any, rows: Any) -> torch.Tensor:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            return outgoing(exchange, rows).clone()

    transport._outgoing = elsewhere


def _other_type(log: DeviceLog, rank: int) -> None:
    """A broadcast of as many bytes, but of another type on the first rank."""
    job = small_jobs.layers

    def layers() -> Any:
        result = job()
        if rank == 0:
            dist.broadcast(torch.zeros(4), 0)
        else:
            dist.broadcast(torch.zeros(2, dtype=torch.float64), 0)
        return result

    small_jobs.layers = layers


def _destroyed_crosswise(log: DeviceLog, rank: int) -> None:
    """Groups of ranks that leave and ranks that stay are destroyed in another order on the rank that leaves."""
    from megatron.balanced.trainer import release

    shared = release._groups_of_both

    def crosswise(release: Any) -> list[dist.ProcessGroup]:
        *groups, world = shared(release)
        return [*(groups[::-1] if rank == 1 else groups), world]

    release._groups_of_both = crosswise


FAULTS = {
    "a wait left out, slots": Fault("slots, resident", "races", _slots_do_not_wait, ("relay.py", "small_jobs.py")),
    "a wait left out, relay": Fault("slots, resident", "races", _relay_does_not_wait, ("relay.py", "relay.py")),
    "a wait left out, ring": Fault("ring", "races", _attention_does_not_wait, ("transport.py", "attention.py")),
    "a wait left out, gather": Fault("gather", "races", _attention_does_not_wait, ("transport.py", "attention.py")),
    "a wait left out, remap": Fault("remap", "races", _remap_does_not_wait, ("transport.py", "attention.py")),
    "a wait left out, move": Fault("layers", "races", _move_does_not_wait, ("transfer.py", "transfer.py")),
    "a message sent while it is written": Fault(
        "gather", "races", _sent_while_written, ("written", "seeded_faults.py", "transport.py")
    ),
    "a bucket sent early": Fault("buckets", "races", _bucket_sent_early, ("param_and_grad_buffer.py", "distributed")),
    "a freed buffer": Fault("slots, resident", "races", _freed_buffer, ("freed", "slots.py", "relay.py")),
    "a shared slot refilled too soon": Fault(
        "slots, shared", "races", _slot_refilled_too_soon, ("written on the stream of", "relay.py", "small_jobs.py")
    ),
    "two sends swapped": Fault("slots, resident", "order", _sends_swapped, ("relay.py", "tag")),
    "an unbatched pair": Fault("ring", "order", _unbatched_pair, ("alone", "transport.py", "the first again")),
    "exits received late": Fault("exits", "order", _exits_received_late, ("token_skipping.py", "p2p_communication")),
    "exits without a batch": Fault(
        "exits", "order", _exits_by_themselves, ("alone", "token_skipping.py", "p2p_communication")
    ),
    "a receive larger than its send": Fault("layers", "order", _receive_too_large, ("transfer.py", "64", "72")),
    "a collective on one rank only": Fault(
        "layers", "order", _collective_on_one_rank, ("seeded_faults.py", "starts no such operation")
    ),
    "two communicators in another order": Fault(
        "layers", "order", _communicators_crossed, ("seeded_faults.py", "the first again")
    ),
    "groups destroyed in another order": Fault(
        "release", "order", _destroyed_crosswise, ("destroy_process_group", "release.py", "the first again")
    ),
    "ranks that have not met": Fault("layers", "order", _ranks_do_not_meet, ("transfer.py", "made by all")),
    "a collective of another type": Fault("layers", "order", _other_type, ("seeded_faults.py", "float64")),
}

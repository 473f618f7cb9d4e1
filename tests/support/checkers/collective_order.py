"""The operations of all ranks, replayed as NCCL would run them.

gloo finishes what NCCL does not: it tells messages apart by their tag, sends before anybody receives, connects two
ranks by themselves, and runs what is on different groups side by side. `replay` takes the operations that each rank
started (`device_log`) and goes by NCCL's rules:

- Operations of one communicator run one after the other, in the order in which a rank starts them. A collective runs
  when it runs on all ranks, with the same kind, sizes and types; messages meet in the order in which they are started,
  and those of a batch end together.
- A communicator is made at its first operation, by all of its ranks at once, and keeps the host until then. A message
  outside of a batch has a communicator of its two ranks.
- A communicator is destroyed by all of its ranks at once, after its operations, and keeps the host until then.
- An operation begins behind what its stream waits for, and the host launches nothing while it waits itself.
- With one queue (CUDA_DEVICE_MAX_CONNECTIONS=1) nothing begins before what was launched earlier has begun, whatever
  streams they are on. With one kernel at a time nothing begins before what was launched earlier has ended: where two
  communicators share a device, NCCL promises no more.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import Literal

from tests.support.checkers.device_log import Clock, Operation, show

__all__ = ["Device", "replay"]

Device = Literal["streams", "one queue", "one kernel"]
_At = tuple[int, int]  # rank, and which of its operations


class _Mismatch(Exception):
    """Two ranks started operations that do not fit."""


def replay(logs: Sequence[Sequence[Operation]], device: Device = "one kernel") -> str | None:
    """What goes wrong, with the call sites at both ends, or None. logs: of each rank."""
    run = _Replay(logs, device)
    try:
        run.run()
    except _Mismatch as mismatch:
        return str(mismatch)
    return run.stuck()


class _Replay:
    def __init__(self, logs: Sequence[Sequence[Operation]], device: Device) -> None:
        self.logs, self.device = logs, device
        self.launched = [0] * len(logs)  # operations, of each rank
        self.begun: set[_At] = set()
        self.ended: set[_At] = set()
        self.reached: list[Clock] = [{} for _ in logs]  # the last operation of each communicator that has ended
        self.made: set[str] = set()
        # Of each rank those of a communicator in order, and how many of them have ended.
        self.lines: list[dict[str, list[int]]] = [defaultdict(list) for _ in logs]
        self.heads: list[dict[str, int]] = [defaultdict(int) for _ in logs]
        self.meetings: dict[tuple, dict[int, _At]] = defaultdict(dict)  # those that belong together, by rank
        self.keys: dict[_At, list[tuple]] = {}
        self.before: list[list[int]] = [[] for _ in logs]  # launched and not begun, or not ended with one kernel
        self._number()

    def _number(self) -> None:
        for rank, log in enumerate(self.logs):
            count: dict[tuple, int] = defaultdict(int)
            for index, operation in enumerate(log):
                self.lines[rank][operation.comm].append(index)
                keys = []
                if operation.messages:
                    for message in operation.messages:
                        ends = (rank, message.peer) if message.sends else (message.peer, rank)
                        keys.append((operation.comm, *ends))
                else:
                    keys.append((operation.comm,))
                for place, key in enumerate(keys):
                    count[key] += 1
                    keys[place] = (*key, count[key])
                    self.meetings[keys[place]][rank] = rank, index
                self.keys[rank, index] = keys

    # Forwards.

    def run(self) -> None:
        while any([self._advance(rank) for rank in range(len(self.logs))]):
            pass

    def _advance(self, rank: int) -> bool:
        progress = False
        log = self.logs[rank]
        while self.launched[rank] < len(log) and self._host(rank, self.launched[rank]) is None:
            if not log[self.launched[rank]].on_host:
                self.before[rank].append(self.launched[rank])
            self.launched[rank] += 1
            progress = True
        for comm, line in self.lines[rank].items():
            head = self.heads[rank][comm]
            while head < len(line) and line[head] < self.launched[rank]:
                at = rank, line[head]
                if at not in self.begun:
                    if self._start(at) is not None:
                        break
                    self._begin(at)
                    progress = True
                if at not in self.ended:
                    if self._partner(at) is not None:
                        break
                    self._end(at)
                    progress = True
                head += 1
                self.heads[rank][comm] = head
        return progress

    def _begin(self, at: _At) -> None:
        rank, index = at
        self.begun.add(at)
        if self.device != "one kernel" and index in self.before[rank]:
            self.before[rank].remove(index)
        for key in self.keys[at]:
            for other in self.meetings[key].values():
                if other in self.begun and other != at:
                    self._compare(key, other, at)

    def _end(self, at: _At) -> None:
        rank, index = at
        operation = self.logs[rank][index]
        self.ended.add(at)
        self.reached[rank][operation.comm] = operation.number
        if self.device == "one kernel" and index in self.before[rank]:
            self.before[rank].remove(index)

    def _compare(self, key: tuple, one: _At, other: _At) -> None:
        a, b = (self.logs[rank][index] for rank, index in (one, other))
        where = f"rank {one[0]}: {a}; rank {other[0]}: {b}"
        if bool(a.messages) != bool(b.messages) or (not a.messages and a.kind != b.kind):
            raise _Mismatch(f"ranks start different operations as number {key[-1]} of {a.comm}: {where}")
        if a.ranks != b.ranks:
            raise _Mismatch(f"ranks have different members of {a.comm}, {a.ranks} and {b.ranks}: {where}")
        if a.messages:
            source, target, number = key[1:]
            sent, received = (
                self.logs[rank][index].messages[self.keys[rank, index].index(key)]
                for rank, index in sorted((one, other), key=lambda at: at[0] != source)
            )
            if (sent.bytes, sent.dtype, sent.tag) != (received.bytes, received.dtype, received.tag):
                raise _Mismatch(
                    f"message {number} from rank {source} to rank {target} on {a.comm} is sent with {sent.bytes} "
                    f"bytes of {sent.dtype}, tag {sent.tag}, at {show(sent.where)} and received with {received.bytes} "
                    f"bytes of {received.dtype}, tag {received.tag}, at {show(received.where)}"
                )
        elif a.signature != b.signature:
            raise _Mismatch(f"{a.kind} number {key[-1]} of {a.comm} is {a.signature} and {b.signature}: {where}")
        elif a.splits is not None and b.splits is not None:
            here, there = (a.ranks.index(at[0]) for at in (one, other))
            for sender, receiver, i, j in ((a, b, here, there), (b, a, there, here)):
                if sender.splits[0][j] != receiver.splits[1][i]:
                    raise _Mismatch(
                        f"{a.kind} number {key[-1]} of {a.comm}: rank {sender.ranks[i]} sends {sender.splits[0][j]} "
                        f"bytes to rank {sender.ranks[j]}, which expects {receiver.splits[1][i]}: {where}"
                    )

    # What an operation waits for: (why, another operation or the rank that has none), or None.

    def _reach(self, rank: int, clock: Clock) -> _At | None:
        """An operation of `rank` that must end before a clock is reached."""
        for comm, number in clock.items():
            if self.reached[rank].get(comm, 0) < number:
                return rank, self.lines[rank][comm][self.heads[rank][comm]]
        return None

    def _host(self, rank: int, index: int) -> tuple[str, _At | int] | None:
        operation = self.logs[rank][index]
        behind = self._reach(rank, operation.host)
        if behind is not None:
            return "the host waits before it starts this, for", behind
        if operation.comm in self.made or operation.on_host:
            return None
        for other in operation.ranks:
            line = self.lines[other].get(operation.comm) if other < len(self.logs) else None
            if not line:
                return "its communicator is made by all of its ranks at once, and none of its operations is on", other
            if self.launched[other] < line[0] or self._reach(other, self.logs[other][line[0]].host) is not None:
                return "its communicator is made by all of its ranks at once, also in", (other, line[0])
        self.made.add(operation.comm)
        return None

    def _start(self, at: _At) -> tuple[str, _At | int] | None:
        rank, index = at
        operation = self.logs[rank][index]
        if operation.on_host:
            return None
        behind = self._reach(rank, operation.after)
        if behind is not None:
            return "its stream waits for", behind
        if self.device != "streams" and (behind := self._reach(rank, operation.queue)) is not None:
            return "in the device's only queue it is behind a wait for", behind
        if self.device != "streams" and self.before[rank][0] < index:
            return "on its device it is behind", (rank, self.before[rank][0])
        return None

    def _partner(self, at: _At) -> tuple[str, _At | int] | None:
        rank, index = at
        operation = self.logs[rank][index]
        for key, message in zip(self.keys[at], operation.messages or [None], strict=True):
            for other in operation.ranks if message is None else [message.peer]:
                partner = self.meetings[key].get(other)
                if partner is None:
                    return "it meets nothing on", other
                if partner not in self.begun:
                    return "it meets", partner
        return None

    # Backwards.

    def _blocked(self, at: _At) -> tuple[str, _At | int] | None:
        rank, index = at
        if index > self.launched[rank]:
            return "the host comes to this after", (rank, self.launched[rank])
        if index == self.launched[rank]:
            return self._host(rank, index)
        line = self.lines[rank][self.logs[rank][index].comm]
        head = line[self.heads[rank][self.logs[rank][index].comm]]
        if head != index:
            return "its communicator runs before it", (rank, head)
        return self._start(at) if at not in self.begun else self._partner(at)

    def stuck(self) -> str | None:
        """The operations that wait for each other, or for one that does not come."""
        for rank, log in enumerate(self.logs):
            for index in range(len(log)):
                if (rank, index) not in self.ended:
                    return self._chain((rank, index))
        return None

    def _chain(self, at: _At) -> str:
        seen: list[_At] = []
        lines: list[str] = []
        while at not in seen:
            seen.append(at)
            blocked = self._blocked(at)
            assert blocked is not None, "what waits for nothing goes on"
            why, next_ = blocked
            lines.append(f"rank {at[0]}: {self.logs[at[0]][at[1]]}\n  {why}")
            if isinstance(next_, int):
                return "\n".join([*lines, f"rank {next_}, which starts no such operation"])
            at = next_
        first = seen.index(at)
        return "\n".join([*lines[first:], f"rank {at[0]}: {self.logs[at[0]][at[1]]}, the first again"])

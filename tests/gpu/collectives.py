"""Every collective that training uses, on 2 and on 4 ranks, which may share a GPU; then large ones, and several
communicators at work at once."""

import time
from typing import Any

from tests.gpu.trial import Trial
from tests.support.patience import PATIENCE

SECONDS = 40.0  # that NCCL waits for a rank
# Batches of messages that are started one after the other, and the time of the host for one. In the part `cost`, where
# nothing is sent, it is missing.
BATCHES, STARTED = 20, "a batch, started"


def _talk(device: str) -> dict[str, float]:
    """Milliseconds of each collective on this rank, and of the host to start messages. Raises AssertionError where one
    gives a wrong value."""
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    from tests.gpu.training import local_device

    place = local_device(device)
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo", timeout=timedelta(seconds=SECONDS if device == "cuda" else PATIENCE)
    )
    rank, size = dist.get_rank(), dist.get_world_size()
    pairs = [dist.new_group([first, first + 1]) for first in range(0, size, 2)]
    took: dict[str, float] = {}

    def whole(value: float, count: int = 1000) -> torch.Tensor:
        return torch.full((count,), float(value), device=place)

    def check(name: str, wanted: Any, call: Any) -> None:
        for _ in range(2):  # the first builds the communicator
            begin = time.perf_counter()
            found = call().cpu()  # waits for the device
            took[name] = 1e3 * (time.perf_counter() - begin)
            assert torch.equal(found, torch.as_tensor(wanted, dtype=found.dtype).expand_as(found)), (name, found)

    def all_reduce(group: Any = None) -> torch.Tensor:
        tensor = whole(rank + 1)
        dist.all_reduce(tensor, group=group)
        return tensor

    def all_gather() -> torch.Tensor:
        gathered = whole(0, size * 1000)
        dist.all_gather_into_tensor(gathered, whole(rank))
        return gathered

    def reduce_scatter() -> torch.Tensor:
        part = whole(0)
        dist.reduce_scatter_tensor(part, torch.arange(float(size), device=place).repeat_interleave(1000))
        return part

    def all_to_all() -> torch.Tensor:
        """Rank r sends 10 (r + 1) numbers to each: uneven, as tokens of experts are."""
        received = whole(-1, sum(10 * (sender + 1) for sender in range(size)))
        dist.all_to_all_single(
            received, whole(rank, 10 * (rank + 1) * size), [10 * (sender + 1) for sender in range(size)],
            [10 * (rank + 1)] * size,
        )  # fmt: skip
        return received

    def broadcast() -> torch.Tensor:
        tensor = whole(rank)
        dist.broadcast(tensor, size - 1)
        return tensor

    def start(sent: torch.Tensor, received: torch.Tensor) -> list[dist.Work]:
        messages = [
            dist.P2POp(dist.irecv, received, (rank - 1) % size),
            dist.P2POp(dist.isend, sent, (rank + 1) % size),
        ]
        return dist.batch_isend_irecv(messages)

    def ring() -> torch.Tensor:
        received = whole(-1)
        for work in start(whole(rank), received):
            work.wait()
        return received

    check("all-reduce", size * (size + 1) / 2, all_reduce)
    check("all-reduce of pairs", 4 * (rank // 2) + 3, lambda: all_reduce(pairs[rank // 2]))
    check("all-gather", [n for n in range(size) for _ in range(1000)], all_gather)
    check("reduce-scatter", size * rank, reduce_scatter)
    check("all-to-all", [n for n in range(size) for _ in range(10 * (n + 1))], all_to_all)
    check("broadcast", size - 1, broadcast)
    check("messages", (rank - 1) % size, ring)
    places = [(whole(rank), whole(-1)) for _ in range(BATCHES)]
    begin = time.perf_counter()
    works = [work for place in places for work in start(*place)]
    took[STARTED] = 1e3 * (time.perf_counter() - begin) / BATCHES
    for work in works:
        work.wait()
    dist.destroy_process_group()
    return took


def _check(trial: Trial, count: int) -> None:
    took = trial.run(count, _talk, trial.device)
    host = max(rank.pop(STARTED) for rank in took)
    name, slowest = max(((name, ms) for rank in took for name, ms in rank.items()), key=lambda pair: pair[1])
    assert all(len(rank) == 7 for rank in took)
    trial.figure(f"slowest: {name}, {slowest:.2g} ms; the host starts a send and a receive in {1e3 * host:.0f} us")


def two_ranks(trial: Trial) -> None:
    _check(trial, 2)


def four_ranks(trial: Trial) -> None:
    _check(trial, 4)


# Bytes of a large message: many times what NCCL sends in one step (a slot of its 4 MiB buffer) and gloo in one segment.
LARGE = {"cuda": 64 << 20, "cpu": 4 << 20}
TURNS = 12  # in which communicators are at work at once


def _talk_at_length(device: str) -> dict[str, float]:
    """Milliseconds of each large message on this rank, and of a turn of two communicators. Raises AssertionError where
    a number is wrong: each differs by its place and by its sender."""
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    from tests.gpu.training import local_device

    place = local_device(device)
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo", timeout=timedelta(seconds=SECONDS if device == "cuda" else PATIENCE)
    )
    rank, size = dist.get_rank(), dist.get_world_size()
    everyone = list(range(size))
    first, second = dist.new_group(everyone), dist.new_group(everyone)
    count = LARGE[device] // 4
    took: dict[str, float] = {}

    def numbers(sender: int, length: int = count) -> torch.Tensor:
        """Whole numbers, which sum exactly."""
        return torch.arange(length, device=place).remainder_(9973).add_(10000 * (sender + 1)).float()

    def check(name: str, wanted: torch.Tensor, call: Any) -> None:
        for _ in range(2):  # the first connects
            torch.cuda.synchronize()
            begin = time.perf_counter()
            found = call()
            torch.cuda.synchronize()
            took[name] = 1e3 * (time.perf_counter() - begin)
        assert torch.equal(found, wanted), f"{name}: {int((found != wanted).sum())} of {found.numel()} numbers differ"

    def ring(process_group: Any, sent: torch.Tensor, received: torch.Tensor) -> list[Any]:
        return dist.batch_isend_irecv(
            [
                dist.P2POp(dist.irecv, received, (rank - 1) % size, process_group),
                dist.P2POp(dist.isend, sent, (rank + 1) % size, process_group),
            ]
        )

    def all_reduce() -> torch.Tensor:
        tensor = numbers(rank)
        dist.all_reduce(tensor)
        return tensor

    def all_gather() -> torch.Tensor:
        gathered = torch.empty(size * count, device=place)
        dist.all_gather_into_tensor(gathered, numbers(rank))
        return gathered

    def reduce_scatter() -> torch.Tensor:
        part = torch.empty(count, device=place)
        dist.reduce_scatter_tensor(part, torch.cat([numbers(rank + receiver) for receiver in everyone]))
        return part

    def all_to_all() -> torch.Tensor:
        """Rank r sends count / (r + 1) numbers to each."""
        shares = [count // (sender + 1) for sender in everyone]
        received = torch.empty(sum(shares), device=place)
        dist.all_to_all_single(received, numbers(rank, shares[rank]).repeat(size), shares, [shares[rank]] * size)
        return received

    def messages() -> torch.Tensor:
        received = torch.empty(count, device=place)
        for work in ring(None, numbers(rank), received):
            work.wait()
        return received

    total = torch.stack([numbers(sender) for sender in everyone]).sum(0)
    check("all-reduce", total, all_reduce)
    check("all-gather", torch.cat([numbers(sender) for sender in everyone]), all_gather)
    check("reduce-scatter", torch.stack([numbers(rank + sender) for sender in everyone]).sum(0), reduce_scatter)
    check("all-to-all", torch.cat([numbers(sender, count // (sender + 1)) for sender in everyone]), all_to_all)
    check("messages", numbers((rank - 1) % size), messages)

    def turn(number: int) -> None:
        """A collective on one communicator and messages on the other are under way while this stream computes, started
        in an order that changes with each turn and is that of all ranks; the last started is waited for first."""
        length = count if number % 3 == 0 else 1000 + number
        summed, sent, received = numbers(rank, length), numbers(rank, length), torch.empty(length, device=place)
        one, other = (first, second) if number % 4 < 2 else (second, first)
        starts = [
            lambda: [dist.all_reduce(summed, group=one, async_op=True)],
            lambda: ring(other, sent, received),
        ]
        started = [start() for start in (starts if number % 2 else starts[::-1])]
        computed = numbers(rank, length).mul_(2)
        for work in (work for works in reversed(started) for work in works):
            work.wait()
        wanted = torch.stack([numbers(sender, length) for sender in everyone]).sum(0)
        assert torch.equal(summed, wanted), f"turn {number}: the sum of {length} numbers is wrong"
        assert torch.equal(received, numbers((rank - 1) % size, length)), f"turn {number}: a message is wrong"
        assert torch.equal(computed, 2 * numbers(rank, length)), f"turn {number}: what was computed meanwhile is wrong"

    begin = time.perf_counter()
    for number in range(TURNS):
        turn(number)
    torch.cuda.synchronize()
    took["a turn of two communicators"] = 1e3 * (time.perf_counter() - begin) / TURNS
    dist.destroy_process_group()
    return took


def large_messages(trial: Trial) -> None:
    """With as many queues of work on the GPU as CUDA has by itself, and with one, as Megatron-LM often asks for."""
    for connections in ("8", "1") if trial.device == "cuda" else ("",):
        environment = {"CUDA_DEVICE_MAX_CONNECTIONS": connections} if connections else {}
        by_rank = trial.run(2, _talk_at_length, trial.device, environment=environment)
        slowest = {name: max(took[name] for took in by_rank) for name in by_rank[0]}
        assert len(slowest) == 6
        said = ", ".join(f"{name} {ms:.0f} ms" for name, ms in slowest.items())
        many = f", CUDA_DEVICE_MAX_CONNECTIONS={connections}" * bool(connections)
        trial.figure(f"{LARGE[trial.device] >> 20} MiB{many}: {said}")

"""What a GPU limits and a CPU does not: memory that torch does not have, options of communicators, open sockets."""

from types import SimpleNamespace
from typing import Any

import pytest


def _usable() -> list[float]:
    """Bytes for plans: on a CPU, and on a GPU of 80 GB of which others have 10 GB."""
    import torch

    from megatron.balanced.layers import planning

    found = [planning.usable_memory()]
    planning.is_cpu = lambda: False
    torch.cuda.mem_get_info = lambda: (30e9, 80e9)
    torch.cuda.memory_reserved = lambda: 40e9
    return [*found, planning.usable_memory()]


def test_plans_use_what_torch_can_have(pool):
    ((on_cpu, on_gpu),) = pool.run(1, _usable)
    assert on_cpu == float("inf")
    assert on_gpu == pytest.approx(0.95 * 70e9)


def _emptied(free: float) -> int:
    """How often a transfer of two layers, between a rank and itself, gives cached memory back."""
    import datetime

    import torch
    import torch.distributed as dist

    from balancing.layers.transfer import Piece
    from megatron.balanced.layers.layer_tensors import Inventory, Request, transfer

    dist.init_process_group("gloo")
    emptied: list[int] = []
    torch.cuda.mem_get_info = lambda: (free, 1.0)
    torch.cuda.empty_cache = lambda: emptied.append(1)
    names = ["0.weight@0:exp_avg", "1.weight@0:exp_avg"]
    inventory = Inventory([Piece(name, 0, 0, 4) for name in names], dict.fromkeys(names, torch.float32))
    request = Request([Piece(name, 0, 1, 3) for name in names])
    shards = {name: (0, torch.arange(4.0)) for name in names}
    group, patience = dist.group.WORLD, datetime.timedelta(minutes=5)
    transfer(shards, request, [inventory], request.pieces, group, patience)
    assert [request.targets[name][1].tolist() for name in names] == [[1.0, 2.0]] * 2
    return len(emptied)


def test_fragments_are_given_back_where_little_is_left(pool):
    assert pool.run(1, _emptied, 0.5) == [0]
    assert pool.run(1, _emptied, 0.01) == [2]


def _options(backends: str) -> list[Any]:
    """Options of a group made beside one that has options of the user, in a job of these backends."""
    import torch.distributed as dist

    from megatron.balanced.shared import process_groups

    dist.init_process_group("gloo")
    theirs = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    theirs.config.max_ctas, theirs.config.net_name = 4, "IB"
    group = SimpleNamespace(_get_backend=lambda device: SimpleNamespace(options=theirs))
    seen: list[Any] = []
    process_groups.connect = lambda process_group, peers=None: None
    dist.get_process_group_ranks = lambda process_group: [0]
    dist.get_backend = lambda process_group=None: backends if process_group is group else "gloo"
    dist.new_group = lambda ranks, *, timeout, backend, pg_options: seen.append((backend, pg_options))
    process_groups.duplicate_group(group, 7.0)
    process_groups.duplicate_group(group, 7.0, on_host=True)
    (backend, options), on_host = seen
    config = options.config
    return [backend, options.is_high_priority_stream, config.max_ctas, config.net_name, on_host]


@pytest.mark.parametrize("backends", ["nccl", "cpu:gloo,cuda:nccl", "cuda:nccl,cpu:gloo"])
def test_options_of_nccl_reach_groups_beside_megatrons(pool, backends):
    assert pool.run(1, _options, backends) == [[None, True, 4, "IB", ("gloo", None)]]


@pytest.mark.parametrize(
    ("soft", "hard", "wanted"), [(1024, 4096, True), (-1, -1, None), (4096, 4096, None), (1024, 1024, False)]
)
def test_sockets_to_a_thousand_ranks(monkeypatch, soft, hard, wanted):
    from megatron.balanced.shared import process_groups

    limits: list[tuple[int, int]] = []
    monkeypatch.setattr(process_groups.resource, "getrlimit", lambda which: (soft, hard))
    monkeypatch.setattr(process_groups.resource, "setrlimit", lambda which, limit: limits.append(limit))
    if wanted is False:
        with pytest.raises(ValueError, match=r"a socket to each of 1000 ranks.* is limited to 1024; allow \d+"):
            process_groups._allow_sockets(1000)
    else:
        process_groups._allow_sockets(1000)
    assert [1256 < limit <= hard for limit, _ in limits] == ([True] if wanted else [])


def test_who_connects_with_whom(monkeypatch):
    """In a small group each with each; in a larger one the ranks of a node, or those that will meet."""
    from balancing import messages

    ranks = {"small": [*range(8, 24)], "large": [*range(4, 64)]}
    monkeypatch.setattr(messages.dist, "get_rank", lambda group=None: 9)
    monkeypatch.setattr(messages.dist, "get_process_group_ranks", lambda group: ranks.get(group))
    monkeypatch.setattr(messages, "detect_launch", lambda environ=None: SimpleNamespace(ranks_per_node=8))
    others = [8, *range(10, 24)]
    assert messages._peers("small", None) == messages._peers("small", [1]) == others
    assert messages._peers("large", None) == [8, *range(10, 16)]
    assert messages._peers("large", (-7, 25)) == [25], "the first stage has no stage before it"

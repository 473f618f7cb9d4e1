"""Balanced training with the parallel layouts of real jobs equals one rank in float64: losses, parameters, moments.

A row of `structures` is one run, with every balancer that applies to it: replicas that differ from group to group and
iteration to iteration, documents spread over ranks, layers that move once.
"""

from functools import cache
from typing import Any

import numpy as np
import pytest

from tests.sequences.test_packed_documents import PACKED, Packed
from tests.support.structures import (
    REAL,
    ROUTERS,
    Row,
    balancers_of,
    batch_of,
    flags_of,
    has_parts_of_micro_batches,
    model_of,
    moves_of,
    option_rows,
    rows,
    world_size,
)
from tests.support.training import MOE, RankRun, Run, differences, join, train_rank

TOLERANCE = 1e-12
STEPS = "--train-iters 5 --lr 1e-3"
# By sigmoid, since Megatron-LM takes the softmax of scores in float32 always.
ROUTER = "--moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-bias-update-rate 0"
MODEL = f"{' '.join(MOE)} {ROUTER} --num-layers 5 {STEPS}"
LOSS = f"{PACKED} --eod-mask-loss --calculate-per-token-loss"

# (iteration, layer) -> the ranks that this rank planned with, the placement's digest, whether it has replicas
Planned = dict[tuple[int, int], tuple[tuple[int, ...], str, bool]]


def _place_at_random() -> Planned:
    """Replicas come from no load: a group draws them anew for each layer and iteration, or none. Returns what is
    recorded of them while the run goes on."""
    import torch.distributed as dist

    from balancing.experts import ReplicaPlacement
    from megatron.balanced.experts import planning
    from megatron.balanced.experts.balancer import ExpertBalancer

    def placed(self: Any, layer: Any, plan: Any, on_host: Any, iteration: int, *unused: Any, **named: Any) -> Any:
        alone = layer.without_replicas.placement
        # Ranks that split a sequence or an expert among them plan together.
        together = dist.get_process_group_ranks(layer._logical.tp_ep_group)
        random = np.random.default_rng([iteration, layer.index, min(together)])
        if random.random() < 0.4:
            return planning.Planned(layer.without_replicas, 0.0, 0.0)
        ranks = layer.ep_group.size()
        slots = np.full((ranks, layer.slots), -1)
        for rank in range(ranks):
            away = np.flatnonzero(alone.home != rank)
            chosen = random.permutation(away)[: random.integers(0, layer.slots + 1)]
            slots[rank, : len(chosen)] = chosen
        nodes = {"ranks_per_node": self._cluster.ranks_per_node, "nics_per_node": self._cluster.nics_per_node}
        return planning.Planned(layer.tables(ReplicaPlacement(alone.home, slots, **nodes)), 0.0, 0.0)

    planning.ReplicaPlanner._plan = placed
    planned: Planned = {}
    begin = ExpertBalancer.begin_schedule

    def begin_schedule(self: Any) -> None:
        begin(self)
        for layer in self._layers():
            together = tuple(dist.get_process_group_ranks(layer._logical.tp_ep_group))
            placement = layer.placement
            key = self._iteration, layer.index
            planned[key] = together, placement.digest(), bool(placement.replicas)

    ExpertBalancer.begin_schedule = begin_schedule
    return planned


def _rank(argv: list[str], moves: dict[int, Any]) -> tuple[RankRun, Planned]:
    """The body of one rank."""
    from tests.support.moving import move_at

    planned = _place_at_random()
    if "--balance-layers" in argv:
        move_at(moves)
    return train_rank(argv, True, True), planned


class References:
    """Runs on one rank, without replicas, one for each model, loss of its routers, and sizes of batches."""

    def __init__(self, pool: Any, folder: Any) -> None:
        self._pool, self._folder = pool, folder
        self.start = cache(self._start)
        self.run = cache(self._run)

    def _start(self, model: str) -> Packed:
        folder = self._folder / str(len(list(self._folder.iterdir())))
        folder.mkdir()
        return Packed(self._pool, folder, f"{MODEL} {model}")

    def _run(self, model: str, router: str, samples: int, batch: int) -> Run:
        sizes = f"--micro-batch-size {samples} --global-batch-size {batch}"
        argv = self.start(model).from_start(f"{LOSS} {ROUTERS[router]} {sizes}")
        return join(self._pool.run(1, train_rank, argv, True, True))

    def of(self, row: Row) -> Run:
        """What a run of the row must equal: one sample is a micro-batch, where that makes no other loss."""
        samples = row["samples"] if has_parts_of_micro_batches(row) else 1
        return self.run(model_of(row), row["router"], samples, batch_of(row))


@pytest.fixture(scope="module")
def references(pool, tmp_path_factory) -> References:
    return References(pool, tmp_path_factory.mktemp("structures"))


def _assert_groups_differ(row: Row, ranks: list[Planned]) -> None:
    """Where groups hold the same experts, one had replicas in a layer where another had none."""
    assert any(used for planned in ranks for _, _, used in planned.values()), "no replica was tried"
    if row["expert data"] == 1:
        return
    by_key: dict[tuple[int, int], set[bool]] = {}
    digests: dict[tuple[int, int], set[str]] = {}
    for planned in ranks:
        for key, (_, digest, used) in planned.items():
            by_key.setdefault(key, set()).add(used)
            digests.setdefault(key, set()).add(digest)
    assert any(len(used) == 2 for used in by_key.values()), "all groups had replicas in the same layers"
    assert any(len(seen) == 2 for seen in digests.values())


def _check(pool: Any, references: References, row: Row) -> None:
    argv = references.start(model_of(row)).from_start(f"{LOSS} {flags_of(row)}")
    ranks = pool.run(world_size(row), _rank, argv, moves_of(row))
    losses, tensors = differences(join([run for run, _ in ranks]), references.of(row))
    assert losses <= TOLERANCE
    assert tensors <= TOLERANCE
    if "experts" in balancers_of(row):
        _assert_groups_differ(row, [planned for _, planned in ranks])


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    cases = [pytest.param(row, id=name) for name, row in REAL.items()]
    for number, row in enumerate(rows(2)):  # one of the pairs always
        cases.append(pytest.param(row, id=f"pair {number}", marks=pytest.mark.exhaustive if number else ()))
    options = option_rows()
    for number, row in enumerate(options):
        cases.append(pytest.param(row, id=f"options {number}", marks=pytest.mark.exhaustive if number else ()))
    metafunc.parametrize("row", cases)


def test_structure(pool, references, row):
    _check(pool, references, row)

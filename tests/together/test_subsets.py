"""Every set of balancers, on eight ranks with several of everything, equals one rank without: 20 steps in float64.

Pipeline 2, expert parallel 2 with two expert-data-parallel groups, many gradient buckets, both overlaps; layers move
twice, and replicas are drawn anew for each group, layer and iteration. Sets with sequences have context parallel 2 and
data parallel 2. The others have data parallel 4 instead, since Megatron-LM has no attention over context-parallel ranks
without Transformer Engine. A checkpoint written under one set after a move is resumed under another.

In the default run `tests/megatron/test_all_balancers.py` represents this family.
"""

import itertools
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.megatron.test_structures import Planned, _assert_groups_differ, _place_at_random
from tests.sequences.test_packed_documents import PACKED, Packed
from tests.support.moving import Plans, move_at
from tests.support.training import MOE, RankRun, Run, differences, join, train_rank

pytestmark = pytest.mark.exhaustive

TOLERANCE = 1e-12
STEPS, SAVED = 20, 15
MODEL = f"{' '.join(MOE)} --moe-aux-loss-coeff 1e-2 --num-layers 5 --untie-embeddings-and-output-weights --lr 1e-3"
LOSS = f"{PACKED} --eod-mask-loss --calculate-per-token-loss --global-batch-size 4 --train-iters {STEPS}"
LAYOUT = (
    "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Et*3|t*2L --expert-model-parallel-size 2 "
    "--moe-token-dispatcher-type alltoall --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather "
    "--ddp-bucket-size 2000"
)
FLAGS = {
    "layers": "--balance-layers",
    "sequences": "--balance-sequences --context-parallel-size 2",
    "experts": "--balance-experts --expert-replica-mode resident",
}
MOVES: Plans = {4: ((2,), (3,)), 17: ((4,), (1,))}  # one before the checkpoint, one after it
RANKS, SECONDS = 8, 1200.0

Set = tuple[str, ...]  # of balancers
SETS: list[Set] = [chosen for count in range(4) for chosen in itertools.combinations(FLAGS, count)]
# Each set's checkpoint under each other set is 56 runs. In these, each set is on both sides of none, and of the set of
# the other balancers.
RESUMED = [
    (saved, resumed)
    for saved, resumed in itertools.permutations(SETS, 2)
    if not saved or not resumed or sorted(saved + resumed) == sorted(FLAGS)
]


def _name(chosen: Set) -> str:
    return "+".join(chosen) or "none"


def _rank(argv: list[str]) -> tuple[RankRun, Planned, Any]:
    """The body of one rank. Returns also the placements, and the layers of each chunk in the end."""
    planned = _place_at_random()
    layers: list[Any] = []
    if "--balance-layers" in argv:
        from megatron.balanced.layers.balancer import LayerBalancer

        move_at(MOVES)
        LayerBalancer.end_step = lambda self: layers.append(self.mover.plan.chunks)  # type: ignore[method-assign]
    return train_rank(argv, True, True), planned, layers


class Runs:
    """One corpus and one start. The run of each set is made once, and leaves its checkpoint."""

    def __init__(self, pool: Any, folder: Path) -> None:
        self._pool, self._folder = pool, folder
        self._start = Packed(pool, folder, MODEL)
        self.of = cache(self._of)
        argv = self._start.from_start(LOSS)
        self.reference = join(pool.run(1, train_rank, argv, True, True, timeout=SECONDS))

    def saved(self, chosen: Set) -> Path:
        """The folder of the checkpoint that is written under a set."""
        self.of(chosen)
        return self._folder / _name(chosen)

    def _of(self, chosen: Set) -> Run:
        save = f"--save {self._folder / _name(chosen)} --save-interval {SAVED} --save-retain-interval {SAVED}"
        return self._train(chosen, [*self._argv(chosen, self._start.from_start), *save.split()])

    def resumed(self, saved: Set, chosen: Set) -> Run:
        """Train under `chosen` from the checkpoint in the middle of the run of `saved`."""
        load = f"--load {self.saved(saved)} --ckpt-step {SAVED}"
        return self._train(chosen, [*self._argv(chosen, self._start.whole), *load.split()])

    def _argv(self, chosen: Set, whole: Any) -> list[str]:
        return whole(" ".join([LOSS, LAYOUT, *(FLAGS[name] for name in chosen)]))

    def _train(self, chosen: Set, argv: list[str]) -> Run:
        ranks = self._pool.run(RANKS, _rank, argv, timeout=SECONDS)
        if "experts" in chosen:
            _assert_groups_differ({"expert data": 2}, [planned for _, planned, _ in ranks])
        else:
            assert not any(planned for _, planned, _ in ranks)
        for _, _, layers in ranks:
            counts = {tuple(tuple(map(len, stage)) for stage in chunks) for chunks in layers}
            assert ("layers" in chosen) == bool(counts)
            assert counts <= {((3,), (2,)), *MOVES.values()} and (not counts or {*MOVES.values()} & counts)
            assert not layers or len(counts) > 1, "nothing moved"
        return join([run for run, _, _ in ranks])


@pytest.fixture(scope="module")
def runs(pool, tmp_path_factory) -> Runs:
    return Runs(pool, tmp_path_factory.mktemp("subsets"))


@pytest.mark.limit(3000)
@pytest.mark.parametrize("chosen", SETS, ids=_name)
def test_a_set_equals_one_rank(runs, chosen):
    losses, tensors = differences(runs.of(chosen), runs.reference)
    assert losses <= TOLERANCE
    assert tensors <= TOLERANCE


@pytest.mark.limit(3000)
@pytest.mark.parametrize(("saved", "resumed"), RESUMED, ids=lambda chosen: _name(chosen))
def test_a_checkpoint_goes_on_under_another_set(runs, saved, resumed):
    run = runs.resumed(saved, resumed)
    left = slice(SAVED, None)
    assert np.allclose(run.losses, runs.reference.losses[left], rtol=TOLERANCE, atol=0)
    _, tensors = differences(Run(runs.reference.losses, [], [], run.parameters), runs.reference)
    assert tensors <= TOLERANCE

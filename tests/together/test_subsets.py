"""Every set of balancers, on eight ranks with several of everything, equals one rank without: 20 steps in float64.

Pipeline 2, expert parallel 2 with two expert-data-parallel groups, many gradient buckets, both overlaps; layers move
twice, and replicas are drawn anew for each group, layer and iteration. Sets with sequences have context parallel 2 and
data parallel 2. The others have data parallel 4 instead, since Megatron-LM has no attention over context-parallel ranks
without Transformer Engine.

A checkpoint written under one set after a move is resumed under another, which moves layers again. There, each rank has
the whole optimizer: Megatron-LM writes shards of it in float32.

In the default run `tests/together/test_all_balancers.py` represents this family.
"""

import itertools
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.sequences.test_packed_documents import PACKED, Packed
from tests.support.moving import Plans, at_end_of_step, move_at
from tests.support.settings import settings
from tests.support.training import MOE, RankRun, Run, differences, join, train_rank
from tests.together.test_structures import Planned, _assert_groups_differ, _place_at_random

pytestmark = pytest.mark.exhaustive

TOLERANCE = 1e-12
MODEL = f"{' '.join(MOE)} --moe-aux-loss-coeff 1e-2 --num-layers 5 --untie-embeddings-and-output-weights --lr 1e-3"
LOSS = f"{PACKED} --eod-mask-loss --calculate-per-token-loss --global-batch-size 4"
LAYOUT = (
    "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Et*3|t*2L --expert-model-parallel-size 2 "
    "--moe-token-dispatcher-type alltoall --overlap-grad-reduce --ddp-bucket-size 2000"
)
SHARDED = "--use-distributed-optimizer --overlap-param-gather"
FLAGS = {
    "layers": "--balance-layers",
    "sequences": "--balance-sequences --context-parallel-size 2",
    "experts": f"--balance-experts {settings('experts', replica_mode='resident')}",
}
LONG, MOVES = "--train-iters 20", {4: ((2,), (3,)), 12: ((4,), (1,))}
SAVED = 4  # of eight steps, between two moves
SHORT, MOVES_OF_SHORT = "--train-iters 8", {2: ((2,), (3,)), 6: ((4,), (1,))}
RANKS, SECONDS = 8, 1200.0

Set = tuple[str, ...]  # of balancers
SETS: list[Set] = [chosen for count in range(4) for chosen in itertools.combinations(FLAGS, count)]
# Each set's checkpoint under each other set is 56 runs. In these, each set is on both sides of the set of the other
# balancers.
RESUMED = [each for each in itertools.permutations(SETS, 2) if sorted(sum(each, ())) == sorted(FLAGS)]


def _name(chosen: Set) -> str:
    return "+".join(chosen) or "none"


def _rank(argv: list[str], moves: Plans) -> tuple[RankRun, Planned, Any]:
    """The body of one rank. Returns also the placements, and the layers of each chunk after each step."""
    planned = _place_at_random()
    layers: list[Any] = []
    if "--balance-layers" in argv:
        move_at(moves)
        at_end_of_step(lambda balancer: layers.append(balancer.mover.plan.chunks))
    return train_rank(argv, True, True), planned, layers


class Runs:
    """One corpus and one start. Runs that several tests compare with are made once."""

    def __init__(self, pool: Any, folder: Path) -> None:
        self._pool, self._folder = pool, folder
        self._start = Packed(pool, folder, MODEL)
        self.reference, self.saved = cache(self._reference), cache(self._saved)

    def _reference(self, steps: str) -> Run:
        argv = self._start.from_start(f"{LOSS} {steps}")
        return join(self._pool.run(1, train_rank, argv, True, True, timeout=SECONDS))

    def long(self, chosen: Set) -> Run:
        return self._train(chosen, self._start.from_start, MOVES, f"{LONG} {SHARDED}")

    def _saved(self, chosen: Set) -> Path:
        """The checkpoint in the middle of a short run under a set."""
        folder = self._folder / _name(chosen)
        save = f"{SHORT} --save {folder} --save-interval {SAVED}"
        run = self._train(chosen, self._start.from_start, MOVES_OF_SHORT, save)
        assert max(differences(run, self.reference(SHORT))) <= TOLERANCE
        return folder

    def resumed(self, saved: Set, chosen: Set) -> Run:
        """The second half of a short run under `chosen`, from the checkpoint of `saved`."""
        load = f"{SHORT} --load {self.saved(saved)} --ckpt-step {SAVED} --no-load-rng"
        return self._train(chosen, self._start.whole, MOVES_OF_SHORT, load)

    def _train(self, chosen: Set, whole: Callable[[str], list[str]], moves: Plans, flags: str) -> Run:
        argv = whole(" ".join([LOSS, LAYOUT, flags, *(FLAGS[name] for name in chosen)]))
        ranks = self._pool.run(RANKS, _rank, argv, moves, timeout=SECONDS)
        if "experts" in chosen:
            _assert_groups_differ({"expert data": 2}, [planned for _, planned, _ in ranks])
        for _, planned, layers in ranks:
            assert bool(planned) == ("experts" in chosen)
            counts = [tuple(tuple(map(len, stage)) for stage in chunks) for chunks in layers]
            if "layers" in chosen:
                assert counts[-1] == moves[max(moves)] != counts[0], "nothing moved"
            else:
                assert not counts
        return join([run for run, _, _ in ranks])


@pytest.fixture(scope="module")
def runs(pool, tmp_path_factory) -> Runs:
    return Runs(pool, tmp_path_factory.mktemp("subsets"))


@pytest.mark.limit(3000)
@pytest.mark.parametrize("chosen", SETS[1:], ids=_name)
def test_a_set_equals_one_rank(runs, chosen):
    losses, tensors = differences(runs.long(chosen), runs.reference(LONG))
    assert losses <= TOLERANCE
    assert tensors <= TOLERANCE


@pytest.mark.limit(3000)
@pytest.mark.parametrize(("saved", "resumed"), RESUMED, ids=_name)
def test_a_checkpoint_goes_on_under_another_set(runs, saved, resumed):
    run, reference = runs.resumed(saved, resumed), runs.reference(SHORT)
    assert np.allclose(run.losses, reference.losses[SAVED:], rtol=TOLERANCE, atol=0)
    _, tensors = differences(Run(reference.losses, [], [], run.parameters), reference)
    assert tensors <= TOLERANCE

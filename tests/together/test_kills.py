"""A rank is killed at some message of a layer's move or of a save: the job ends, and a restart equals no kill at all.

It restarts from the last whole checkpoint. Losses and parameters are those of a run that nobody disturbed, bit for bit.
"""

import os
import signal
from functools import cache
from itertools import product
from typing import Any

import numpy as np
import pytest

from tests.support.moving import Plans, move_at
from tests.support.sampled import sampled
from tests.support.training import EXACT, MOCK_DATA, MODEL, RankRun, join, train_rank

RANKS = 4
# Layers move in the third iteration, and in the fifth, of which there is a checkpoint of the third before.
MOVES: Plans = {2: ((1,), (3,)), 4: ((3,), (1,))}
FLAGS = "--pipeline-model-parallel-size 2 --balance-layers --overlap-grad-reduce --ddp-bucket-size 2000"
BASE = [*MODEL, *MOCK_DATA, *EXACT, *"--init-method-std 0.1 --train-iters 6".split(), *FLAGS.split()]
SAVES = 3  # iterations
# Functions of torch.distributed through which ranks exchange something in a move or a save.
CALLS = (
    "batch_isend_irecv",
    "broadcast",
    "broadcast_object_list",
    "all_reduce",
    "all_gather",
    "all_gather_object",
    "gather_object",
    "barrier",
)
PARTS = (0.0, 0.25, 0.5, 0.75, 1.0)  # of the messages


def _rank(argv: list[str], phase: str, victim: int, number: int | None) -> tuple[RankRun, int]:
    """One rank; `victim` ends at its message `number` (from 0) in the second phase of a kind, "move" or "save".

    Returns the run, and the messages in that phase.
    """
    import torch.distributed as dist
    from megatron.training import checkpointing, training

    from megatron.balanced.layers.mover import LayerMover

    seen = {"phase": 0, "inside": False, "messages": 0}

    def counted(original: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            if seen["inside"] and seen["phase"] == 2:
                if number is not None and seen["messages"] == number and dist.get_rank() == victim:
                    os.kill(os.getpid(), signal.SIGKILL)
                seen["messages"] += 1
            return original(*args, **kwargs)

        return call

    def entered(original: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            seen["inside"] = True
            seen["phase"] += 1
            try:
                return original(*args, **kwargs)
            finally:
                seen["inside"] = False

        return run

    for name in CALLS:
        setattr(dist, name, counted(getattr(dist, name)))
    if phase == "move":
        LayerMover.move = entered(LayerMover.move)
    else:
        training.save_checkpoint = entered(checkpointing.save_checkpoint)
    move_at(MOVES)
    return train_rank(argv, True), seen["messages"]


@cache
def _undisturbed(pool: Any, phase: str, folder: str) -> tuple[Any, list[int]]:
    """The run, and the messages of each rank in the second move or save."""
    ranks = pool.run(RANKS, _rank, [*BASE, "--save", folder, "--save-interval", str(SAVES)], phase, -1, None)
    return join([run for run, _ in ranks]), [messages for _, messages in ranks]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return str(tmp_path_factory.mktemp("undisturbed"))


@pytest.mark.parametrize("phase, part", sampled(product(("move", "save"), PARTS), ("save", 0.5)))
def test_a_restart_equals_the_undisturbed_run(pool, folder, tmp_path, phase, part):
    whole, messages = _undisturbed(pool, phase, f"{folder}/{phase}")
    victim = 1 if phase == "move" else 2
    assert messages[victim] > 2, "nothing is exchanged there"
    saved = [*BASE, "--save", str(tmp_path), "--save-interval", str(SAVES)]
    with pytest.raises(RuntimeError, match=f"rank {victim} of {RANKS} died"):
        pool.run(RANKS, _rank, saved, phase, victim, round(part * (messages[victim] - 1)))
    saved_at = int((tmp_path / "latest_checkpointed_iteration.txt").read_text())
    assert saved_at == SAVES or (phase == "save" and part == 1), "a checkpoint counts before it is whole"
    again = pool.run(RANKS, _rank, [*saved, "--load", str(tmp_path)], phase, -1, None)
    restarted = join([run for run, _ in again])
    assert restarted.losses == whole.losses[saved_at:]
    assert restarted.parameters.keys() == whole.parameters.keys()
    for name, tensor in whole.parameters.items():
        assert np.array_equal(restarted.parameters[name], tensor), name

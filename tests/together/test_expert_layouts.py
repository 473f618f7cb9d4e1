"""A checkpoint of experts, written after layers moved and replicas were used, goes on under another layout.

With all balancers on and the optimizer's state: losses and parameters are those of the run that wrote it. Between
expert parallel 1 and more Megatron-LM loads weights alone (`tests/megatron/test_checkpoint_errors.py`).
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.corpus import heavy_tailed, write_documents
from tests.support.moving import Plans, move_at
from tests.support.sampled import sampled
from tests.support.settings import settings
from tests.support.training import EXACT, MODEL, MOE, RankRun, Run, differences, join, train_rank

# The vocabulary is padded alike with and without tensor parallel.
BASE = [
    *MODEL, *EXACT, *MOE, *"--moe-token-dispatcher-type alltoall --dataloader-inter-document-masking".split(),
    *"--global-batch-size 8 --init-method-std 0.1 --make-vocab-size-divisible-by 64 --ckpt-format torch_dist".split(),
]  # fmt: skip
MOVES: Plans = {1: ((3,), (1,))}
EXPERTS = f"--balance-experts {settings('experts', min_gain=0)} --expert-model-parallel-size"
SEQUENCES = "--balance-sequences --context-parallel-size 2"
LAYERS = "--balance-layers --pipeline-model-parallel-size"
ALL = f"{LAYERS} 2 {SEQUENCES} {EXPERTS} 2"

# ranks and flags that write, and that go on
LAYOUTS = {
    "EP 4, PP 1, CP 1": ((4, ALL), (4, f"{EXPERTS} 4")),
    "EP 4": ((4, ALL), (8, f"{LAYERS} 2 {SEQUENCES} {EXPERTS} 4")),
    "PP 1": ((4, ALL), (2, f"{SEQUENCES} {EXPERTS} 2")),
    "PP 4": ((4, ALL), (8, f"{LAYERS} 4 {SEQUENCES} {EXPERTS} 2")),
    "CP 1": ((4, ALL), (4, f"{LAYERS} 2 {EXPERTS} 2")),
    "TP 2, CP 1": ((4, ALL), (4, f"--tensor-model-parallel-size 2 --sequence-parallel {EXPERTS} 2")),
    "from EP 4, PP 1, CP 1": ((4, f"{EXPERTS} 4"), (4, ALL)),
    "from TP 2, CP 1": ((4, f"--tensor-model-parallel-size 2 --sequence-parallel {EXPERTS} 2"), (4, ALL)),
}


def _rank(argv: list[str], moves: Plans) -> RankRun:
    if moves:
        move_at(moves)
    return train_rank(argv, True)


def _train(pool: Any, ranks: int, flags: str, folder: Path, moves: Plans | None = None) -> Run:
    documents = write_documents(folder / "documents", heavy_tailed(400))
    return join(pool.run(ranks, _rank, [*BASE, *documents, *flags.split()], moves or {}))


@pytest.mark.parametrize("name", sampled(LAYOUTS, "EP 4, PP 1, CP 1"))
def test_goes_on_under_another_layout(pool, tmp_path, name):
    (ranks, flags), (later_ranks, later_flags) = LAYOUTS[name]
    moves = MOVES if "--balance-layers" in flags else None
    whole = _train(pool, ranks, f"{flags} --save {tmp_path} --save-interval 2", tmp_path, moves)
    load = f"--load {tmp_path} --ckpt-step 2 --no-load-rng"
    resumed = _train(pool, later_ranks, f"{later_flags} {load}", tmp_path)
    assert resumed.losses == pytest.approx(whole.losses[2:], rel=1e-12)
    _, parameters = differences(replace(resumed, losses=whole.losses), whole)
    assert parameters <= 1e-12

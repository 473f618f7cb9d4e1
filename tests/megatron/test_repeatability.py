"""The same command gives the same run bit for bit, in every precision, with dropout."""

import pytest

from tests.support.sampled import sampled
from tests.support.training import MODEL, MOE, assert_same, train

# ranks, flags
RUNS = {
    "float32, PP 2": (2, "--pipeline-model-parallel-size 2"),
    "float32, TP 2, sequence parallel": (2, "--tensor-model-parallel-size 2 --sequence-parallel"),
    "float32, EP 2": (2, f"{' '.join(MOE)} --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall"),
    "float32, DP 2, both overlaps": (
        2,
        "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
    ),
    "float64": (1, "--fp64"),
    "bf16, PP 2, DP 2": (4, "--bf16 --pipeline-model-parallel-size 2"),
    "bf16, EP 2, distributed optimizer": (
        2,
        f"--bf16 {' '.join(MOE)} --expert-model-parallel-size 2 --use-distributed-optimizer",
    ),
    "fp16": (1, "--fp16 --initial-loss-scale 1024"),
}


@pytest.mark.parametrize(
    "name", sampled(RUNS, "float32, DP 2, both overlaps", "bf16, EP 2, distributed optimizer", "fp16")
)
def test_runs_repeat(pool, corpus, name):
    world_size, flags = RUNS[name]

    def run():
        return train(
            pool, world_size, f"--init-method-std 0.1 --lr 3e-3 {flags}", base=[*MODEL, *corpus], parameters=True
        )

    first = run()
    assert first.losses[-1] < first.losses[0] - 0.05, "it does not learn"
    assert_same(run(), first)


def test_seed_matters(pool, corpus):
    losses = [train(pool, 1, f"--seed {seed}", base=[*MODEL, *corpus]).losses for seed in (1, 2)]
    assert losses[0] != losses[1]

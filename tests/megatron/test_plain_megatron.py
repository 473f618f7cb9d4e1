"""Without flags of this package a run equals Megatron-LM's bit for bit, including dropout."""

import pytest

from tests.support.plain import train_plainly
from tests.support.sampled import sampled
from tests.support.training import MOCK_DATA, MODEL, MOE, assert_same, train

# ranks, flags
RUNS = {
    "one rank": (1, ""),
    "ends of documents without a loss": (1, "--eod-mask-loss"),
    "PP 2": (2, "--pipeline-model-parallel-size 2"),
    "PP 2, interleaved": (2, "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2"),
    "DP 2, bf16, both overlaps": (
        2,
        "--bf16 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
    ),
    "EP 2": (2, f"{' '.join(MOE)} --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall"),
}


@pytest.mark.parametrize(
    "name",
    sampled(RUNS, "ends of documents without a loss", "PP 2, interleaved", "DP 2, bf16, both overlaps", "EP 2"),
)
def test_losses_and_weights_are_upstreams(pool, corpus, tmp_path, name):
    world_size, flags = RUNS[name]
    upstream = train_plainly(pool, world_size, [*MODEL, *corpus, *flags.split()], tmp_path)
    assert len(upstream.losses) == 4
    assert_same(train(pool, world_size, flags, base=[*MODEL, *corpus], parameters=True), upstream)


def test_mock_data_is_upstreams(pool, tmp_path):
    upstream = train_plainly(pool, 1, [*MODEL, *MOCK_DATA], tmp_path)
    assert_same(train(pool, 1, parameters=True), upstream)

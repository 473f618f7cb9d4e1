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
    # A blend whose parts are one corpus, validation and a test set, and what reads ahead.
    "DP 2, blend, validation, workers": (
        2,
        "--data-path 25 {corpus} 75 {corpus} --split 80,15,5 --eval-interval 2 --eval-iters 2 --num-workers 2",
    ),
}


@pytest.mark.parametrize(
    "name",
    sampled(
        RUNS,
        "PP 2, interleaved",
        "DP 2, bf16, both overlaps",
        "EP 2",
        "DP 2, blend, validation, workers",
    ),
)
def test_losses_and_weights_are_upstreams(pool, corpus, tmp_path, name):
    world_size, flags = RUNS[name]
    flags = flags.format(corpus=corpus[corpus.index("--data-path") + 1])
    upstream = train_plainly(pool, world_size, [*MODEL, *corpus, *flags.split()], tmp_path)
    run = train(pool, world_size, flags, base=[*MODEL, *corpus], parameters=True)
    assert len(upstream.losses) == 4 and len(upstream.validation) == 4 * ("validation" in name)
    assert_same(run, upstream)
    assert run.validation == upstream.validation


def test_mock_data_is_upstreams(pool, tmp_path):
    upstream = train_plainly(pool, 1, [*MODEL, *MOCK_DATA], tmp_path)
    assert_same(train(pool, 1, parameters=True), upstream)

"""All balancers and freezing in one run equal one rank: documents spread over ranks, replicas of hot experts, layers
that move, ranks that leave, and two layers frozen from the fourth iteration on."""

from pathlib import Path

import pytest

from tests.layers.test_release import _train
from tests.sequences.test_packed_documents import PACKED, Packed
from tests.support.events import events_in
from tests.support.packages_apart import folder, version, why_missing
from tests.support.pool import Pool
from tests.support.settings import settings
from tests.support.training import MOE, assert_close

OVERLAPS = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
LAYOUT = f"--context-parallel-size 2 --pipeline-model-parallel-size 2 --expert-model-parallel-size 2 {OVERLAPS}"
UNTIED = "--untie-embeddings-and-output-weights"
FREEZE = f"{UNTIED} --freeze-layers 2 --freeze-layers-start 3"
BALANCED = f"--balance-sequences --balance-experts {settings('experts', min_gain=0)}"


def test_all_at_once_equal_one_rank(pool, tmp_path):
    _check_all_at_once(pool, tmp_path)


def test_all_at_once_equal_one_rank_on_the_oldest_megatron(tmp_path):
    name = "megatron_core"
    if why := why_missing(name, "megatron-core"):
        pytest.skip(why)
    pool = Pool(first=[str(folder(name))])
    try:
        assert {tuple(told) for told in pool.run(1, _megatron)} == {(version(name), version(name))}
        _check_all_at_once(pool, tmp_path)
    finally:
        pool.stop()


def _megatron() -> list[str]:
    """The version that ranks have imported, and the oldest that is taken without a remark. All patches fit."""
    import megatron.core

    from megatron.balanced.trainer import patches
    from megatron.balanced.trainer.checks.megatron import MEGATRON_VERSIONS, check_megatron

    assert check_megatron() == []
    for patch in patches.PATCHES:
        patches.check(patch)
    return [megatron.core.__version__.partition("+")[0], MEGATRON_VERSIONS[0]]  # in a checkout it names the commit


def _check_all_at_once(pool: Pool, tmp_path: Path) -> None:
    model = Packed(
        pool, tmp_path, f"{' '.join(MOE)} {UNTIED} --moe-token-dispatcher-type alltoall --moe-aux-loss-coeff 1e-2"
    )
    steps = f"--eod-mask-loss --train-iters 6 {FREEZE}"
    reference = model.train(1, f"{PACKED} {steps}")
    argv = model.from_start(f"{PACKED} {steps} {LAYOUT} {BALANCED} --balance-report {tmp_path}")
    run, _ = _train(pool, 4, 2, "", {2: ((3,), (1,)), 4: ((1,), (3,)), 5: ((4,),)}, argv)
    assert_close(run, reference)
    lines = events_in(tmp_path)
    for balancer in ("experts", "sequences"):  # layers move by the test's plans, not by decision
        assert {line["iteration"] for line in lines if line["balancer"] == balancer} == set(range(1, 7))
    later = [line for line in lines if line["balancer"] == "experts" and line["iteration"] > 4]
    assert {line["layer"] for line in later if line["reason"] == "frozen"} == {0, 1}
    assert {line["layer"] for line in later if line["action"] == "replicate"} <= {2, 3}
    assert any(line["action"] == "replicate" for line in later)

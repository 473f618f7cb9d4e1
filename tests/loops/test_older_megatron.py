"""The example of a plain loop on the oldest megatron-core that the balancers take, 0.18: no number changes."""

from pathlib import Path

import numpy as np
import pytest

from tests.support.packages_apart import folder, version, why_missing
from tests.support.plain_loop import ALL, train
from tests.support.pool import Pool

NAME, RANKS, STEPS = (
    "megatron_core_0_18",
    4,
    6,
)  # layers move after four steps; a loss tells wrong moments after two more


def install() -> None:
    """Import the example, and with it megatron-core, before there are ranks. Our trainer needs a newer one."""
    from examples import plain_loop  # noqa: F401


def _run(folder: Path, balanced: bool) -> tuple[str, list[float], str, list[tuple[str, int]]]:
    """On each rank: train. Returns the version, losses, where layers end, and what was moved."""
    losses, _, layout, events = train(STEPS, folder, ALL if balanced else ())
    import megatron.core  # after the example has chosen the device

    return megatron.core.__version__, losses, layout, [(each["balancer"], int(each["moved_bytes"])) for each in events]


def test_a_plain_loop_balances_and_changes_no_number(tmp_path):
    if why := why_missing(NAME, "megatron-core", "megatron_core"):
        pytest.skip(why)
    pool = Pool("none", before=__name__, first=[str(folder(NAME))])
    runs = []
    try:
        for balanced in (False, True):
            (of := tmp_path / f"balanced {balanced}").mkdir()
            runs.append(pool.run(RANKS, _run, of, balanced))
    finally:
        pool.stop()
    moved = dict.fromkeys(("experts", "sequences", "layers"), 0)
    for (_, expected, at_first, nothing), (found, losses, layout, events) in zip(*runs, strict=True):
        assert found.partition("+")[0] == version(NAME, "megatron_core")
        np.testing.assert_allclose(losses, expected, rtol=1e-12)
        assert layout != at_first and not nothing
        for balancer, size in events:
            if balancer != "cluster":  # what calls took
                moved[balancer] += size
    assert any(losses for _, losses, *_ in runs[1]) and all(moved.values()), moved

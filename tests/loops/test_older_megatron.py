"""The example of a plain loop on the oldest megatron-core that the balancers take, 0.18: no number changes."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.support.packages_apart import folder, version, why_missing
from tests.support.patience import PATIENCE
from tests.support.plain_loop import train
from tests.support.pool import REPOSITORY, single_threaded

NAME, RANKS, STEPS = "megatron_core_0_18", 4, 6


def _run(folder: Path, balanced: bool) -> None:
    """On each rank: train, and write the version, losses, where layers end, and what was moved."""
    import torch.distributed as dist

    losses, _, layout, events = train(STEPS, folder, balanced)
    import megatron.core  # after the example has chosen the device

    moved = [(event["balancer"], int(event["moved_bytes"])) for event in events]
    told = (megatron.core.__version__, losses, layout, moved)
    (folder / f"rank{dist.get_rank()}.json").write_text(json.dumps(told))
    dist.destroy_process_group()


def _train(folder: Path, first: str, balanced: bool) -> list[list]:
    """What each rank wrote, with the megatron-core of the folder `first`."""
    folder.mkdir()
    program = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}", "-m"]
    done = subprocess.run(
        [*program, __name__, str(folder), str(int(balanced))], cwd=REPOSITORY, env=single_threaded([first]), text=True,
        capture_output=True, timeout=PATIENCE,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(RANKS)]


def test_a_plain_loop_balances_and_changes_no_number(tmp_path):
    if why := why_missing(NAME, "megatron-core", "megatron_core"):
        pytest.skip(why)
    first = str(folder(NAME))
    plain, balanced = (_train(tmp_path / name, first, name == "balanced") for name in ("plain", "balanced"))
    moved = dict.fromkeys(("experts", "sequences", "layers"), 0)
    for (found, losses, layout, events), (_, expected, at_first, nothing) in zip(balanced, plain, strict=True):
        assert found.partition("+")[0] == version(NAME, "megatron_core")
        np.testing.assert_allclose(losses, expected, rtol=1e-12)
        assert layout != at_first and not nothing
        for balancer, size in events:
            if balancer != "cluster":  # what calls took
                moved[balancer] += size
    assert any(losses for _, losses, *_ in plain) and all(moved.values()), moved


if __name__ == "__main__":
    _run(Path(sys.argv[1]), bool(int(sys.argv[2])))

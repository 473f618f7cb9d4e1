"""A checkpoint knows nothing of moves: saved after one, it loads under any layout, and after a death in the midst of
one the last checkpoint goes on as if nothing had been tried."""

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from moving import train_moving
from plain import train_plainly
from pool import free_port, single_threaded
from training import EXACT, MODEL, Run, assert_same, differences, train

ROOT = Path(__file__).resolve().parent.parent
PP2 = "--pipeline-model-parallel-size 2"
OVERLAPS = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
EXACTLY = f"{' '.join(EXACT)} --init-method-std 0.1"
# Upstream gathers what it reshards through float32. The bias of the keys has no gradient but noise, so: no biases.
SINGLE = EXACTLY.replace("--fp64", "--disable-bias-linear")
LATER = "--no-load-rng --ckpt-step 3"


def _moved_and_saved(pool, world_size: int, flags: str, base: list[str], folder: Path) -> Run:
    """Four iterations, layers moved before the third, saved after it."""
    save = f"{flags} --save {folder} --save-interval 3"
    return train_moving(pool, world_size, save, {2: ((1,), (3,))}, base=base)[0]


def _assert_goes_on(run: Run, whole: Run, of_losses: float, of_parameters: float) -> None:
    assert run.losses == pytest.approx(whole.losses[3:], rel=of_losses)
    assert differences(replace(run, losses=whole.losses), whole)[1] <= of_parameters


def test_goes_on_in_the_same_layout_or_another(pool, corpus, tmp_path):
    base = [*MODEL, *corpus]
    whole = _moved_and_saved(pool, 2, f"{EXACTLY} {PP2}", base, tmp_path)
    load = f"--load {tmp_path} {LATER}"
    # A restart into the layout that layers moved to is the live run, bit for bit.
    layout = f"{PP2} --pipeline-model-parallel-layout Et|tttL"
    restarted = train(pool, 2, f"{EXACTLY} {layout} {load}", base=base, parameters=True)
    assert restarted.losses == whole.losses[3:]
    assert_same(replace(restarted, losses=whole.losses, grad_norms=whole.grad_norms), whole)
    other = train(pool, 4, f"{EXACTLY} --pipeline-model-parallel-size 4 {load}", base=base, parameters=True)
    _assert_goes_on(other, whole, 1e-12, 1e-12)


def test_sharded_state_goes_on_under_another_layout(pool, corpus, tmp_path):
    base = [*MODEL, *corpus]
    whole = _moved_and_saved(pool, 4, f"{SINGLE} {PP2} {OVERLAPS}", base, tmp_path)
    resumed = train(pool, 2, f"{SINGLE} {PP2} {OVERLAPS} --load {tmp_path} {LATER}", base=base, parameters=True)
    _assert_goes_on(resumed, whole, 1e-6, 1e-5)


def test_goes_on_without_our_package(pool, corpus, tmp_path):
    base = [*MODEL, *corpus]
    whole = _moved_and_saved(pool, 2, f"{SINGLE} {PP2}", base, tmp_path)
    theirs = train_plainly(pool, 1, [*base, *f"{SINGLE} --load {tmp_path} {LATER}".split()], tmp_path)
    _assert_goes_on(theirs, whole, 1e-6, 1e-5)


def _start(folder: Path, victim: int, argv: list[str]) -> list[subprocess.Popen]:
    """Two ranks started by hand: a launcher would stop the other one itself, before it can speak."""
    port = free_port()
    ranks = []
    for rank in range(2):
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
        place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        with (folder / f"rank-{rank}.log").open("wb") as output:
            ranks.append(
                subprocess.Popen(
                    [sys.executable, ROOT / "tests" / "killed_in_move.py", str(victim), "3", "3,1", *argv],
                    env=single_threaded() | {name: str(value) for name, value in place.items()},
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    cwd=folder,
                )
            )
    return ranks


def test_a_rank_killed_while_layers_move(pool, corpus, tmp_path):
    """Everybody stops, one line names it, and the last checkpoint goes on as if nothing had moved."""
    victim, base = 1, [*MODEL, *corpus, *EXACTLY.split(), *PP2.split()]
    ranks = _start(tmp_path, victim, [*base, "--balance-layers", "--save", f"{tmp_path}/save", "--save-interval", "2"])
    try:
        assert ranks[victim].wait(timeout=150) == -signal.SIGKILL
        assert ranks[1 - victim].wait(timeout=90) not in (0, -signal.SIGKILL)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    told = (tmp_path / f"rank-{1 - victim}.log").read_text()
    assert f"rank {victim} died or stopped answering" in told, told[-3000:]
    assert os.listdir(tmp_path / "save")
    resumed = train(pool, 2, f"--load {tmp_path}/save", base=base)
    unmoved = train(pool, 2, "", base=base)
    np.testing.assert_array_equal(resumed.losses, unmoved.losses[2:])

"""Checkpoints do not depend on moves: one saved after a move loads under any layout, and after a rank has died during
a move the run resumes from the last one."""

import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.moving import Plans, at_end_of_step, move_at, train_moving
from tests.support.patience import PATIENCE
from tests.support.plain import train_plainly
from tests.support.training import (
    EXACT,
    MODEL,
    RankRun,
    Run,
    assert_same,
    differences,
    join,
    train,
    train_rank,
    watch,
)

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


@pytest.mark.exhaustive
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


def _saves_slowly(argv: list[str], plans: Plans, folder: Path) -> tuple[RankRun, bool]:
    """A rank whose checkpoints are written by another process, which waits until layers have moved and one more step
    has ended. Returns the run, and whether the checkpoint was complete before."""
    from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

    from tests.support.program import parse

    moved, write = folder / f"moved on {os.environ['RANK']}", FileSystemWriterAsync.write_preloaded_data
    complete = []

    def write_later(*args: Any, **kwargs: Any) -> Any:
        deadline = time.monotonic() + PATIENCE
        while not moved.exists():
            assert time.monotonic() < deadline, "layers did not move"
            time.sleep(0.01)
        return write(*args, **kwargs)

    def see(balancer: Any) -> None:
        if balancer.iteration == min(plans):
            complete.append((folder / "latest_checkpointed_iteration.txt").exists())
            moved.touch()

    FileSystemWriterAsync.write_preloaded_data = staticmethod(write_later)
    at_end_of_step(see)
    move_at(plans)
    args, config, train = parse(argv)
    args.async_save, args.use_persistent_ckpt_worker, args.async_strategy = True, False, "mcore"
    finish = watch(True)
    train(args, config)
    return finish(), complete[0]


def test_a_checkpoint_that_is_written_while_layers_move(pool, corpus, tmp_path):
    """It has what was there when it began, wherever layers were."""
    base = [*MODEL, *corpus, *EXACTLY.split(), *PP2.split()]
    save = ["--balance-layers", "--save", str(tmp_path), "--save-interval", "2"]
    ranks = pool.run(2, _saves_slowly, [*base, *save], {2: ((1,), (3,))}, tmp_path)
    assert not any(complete for _, complete in ranks), "the writer did not wait"
    whole = join([run for run, _ in ranks])
    resumed = train(pool, 2, f"--load {tmp_path} --ckpt-step 2", base=base, parameters=True)
    _assert_goes_on(resumed, replace(whole, losses=[0.0, *whole.losses]), 1e-12, 1e-12)


def _dies_in_a_move(argv: list[str], victim: int) -> None:
    """Layers move before the fourth iteration, and the victim kills itself when it has sent what it gives away."""
    from megatron.balanced.layers import layer_tensors

    run_transfers = layer_tensors.run_transfers

    def transfer_and_die(transfers: list, *args: Any, **named: Any) -> int:
        sent = run_transfers(transfers, *args, **named)
        if transfers and int(os.environ["RANK"]) == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        return sent

    layer_tensors.run_transfers = transfer_and_die
    move_at({3: ((3,), (1,))})
    train_rank(argv, False)


def test_a_rank_killed_while_layers_move(pool, corpus, tmp_path):
    """The job ends, and its last checkpoint goes on as if nothing had moved."""
    base = [*MODEL, *corpus, *EXACTLY.split(), *PP2.split()]
    save = ["--balance-layers", "--save", str(tmp_path), "--save-interval", "2"]
    with pytest.raises(RuntimeError, match=f"rank 1 of 2 died, exit code -{signal.SIGKILL:d}"):
        pool.run(2, _dies_in_a_move, [*base, *save], 1)
    resumed = train(pool, 2, f"--load {tmp_path}", base=base)
    unmoved = train(pool, 2, "", base=base)
    assert len(resumed.losses) == 2
    np.testing.assert_array_equal(resumed.losses, unmoved.losses[2:])

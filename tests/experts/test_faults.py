"""Replicas leave no trace: in checkpoints, in evaluation, and when a rank dies during their transfer."""

import functools
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.replaced import replace_name
from tests.support.events import events_in
from tests.support.plain import train_plainly
from tests.support.settings import settings
from tests.support.training import EXACT, MODEL, RankRun, Run, differences, join, train, train_rank

ROOT = Path(__file__).resolve().parents[2]
EXPERTS = (
    "--swiglu --disable-bias-linear --num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 32 --num-layers 2 "
    "--moe-token-dispatcher-type alltoall --init-method-std 0.1 --ckpt-format torch_dist"
).split()
EP2 = "--expert-model-parallel-size 2"
BALANCE = "--balance-experts"


def _assert_replicated(report: Path, iteration: int) -> None:
    replicated = [event["iteration"] for event in events_in(report, action="replicate")]
    assert replicated, "no replica in the whole run"
    assert min(replicated) <= iteration, f"nothing was replicated before iteration {iteration + 1}"


def _keys(checkpoint: Path) -> dict[str, object]:
    """The name of everything in a checkpoint, with the shape of what is a tensor."""
    from torch.distributed.checkpoint import FileSystemReader

    stored = FileSystemReader(str(checkpoint)).read_metadata().state_dict_metadata
    return {name: tuple(getattr(value, "size", ())) for name, value in stored.items()}


@pytest.mark.parametrize(
    "more",
    [
        pytest.param("", marks=pytest.mark.exhaustive),
        f"--use-distributed-optimizer {settings('experts', replica_mode='shared')}",
    ],
)
def test_a_checkpoint_has_the_keys_it_always_has(pool, corpus, tmp_path, more):
    base = [*MODEL, *corpus, *EXPERTS, "--train-iters", "3"]
    optimizer = "--use-distributed-optimizer" if "--use-distributed-optimizer" in more else ""
    save = f"{EP2} --save-interval 3 --save {tmp_path}"
    balanced = f"{save}/balanced {BALANCE} {more} --balance-report {tmp_path}/report"
    train(pool, 2, balanced, base=base)
    train(pool, 2, f"{save}/unbalanced {optimizer}", base=base)
    _assert_replicated(tmp_path / "report", 3)
    saved, usual = (_keys(tmp_path / name / "iter_0000003") for name in ("balanced", "unbalanced"))
    assert saved == usual
    assert sum("experts" in name for name in saved) > 0


@pytest.mark.exhaustive
def test_experts_go_on_without_our_package_and_back(pool, corpus, tmp_path):
    """Iterations 1 to 3 balanced, the 4th by Megatron-LM alone, the 5th and 6th balanced, against six balanced ones."""
    base = [*MODEL, *corpus, *EXPERTS, "--train-iters", "6"]
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    save = f"--save {ours} --save-interval 3 --balance-report {tmp_path}"
    whole = train(pool, 2, f"{EP2} {BALANCE} {save}", base=base)
    _assert_replicated(tmp_path, 3)
    fourth = f"{EP2} --load {ours} --ckpt-step 3 --save {theirs} --save-interval 1"
    without = train_plainly(pool, 2, [*base, *fourth.split()], tmp_path)
    rest = train(pool, 2, f"{EP2} {BALANCE} --load {theirs} --ckpt-step 4", base=base)
    np.testing.assert_allclose(without.losses, whole.losses[3:], rtol=1e-5)
    np.testing.assert_allclose(rest.losses, whole.losses[4:], rtol=1e-5)


@pytest.mark.exhaustive
def test_weights_load_without_our_package_on_any_number_of_ranks(pool, corpus, tmp_path):
    base = [*MODEL, *corpus, *EXPERTS]
    save = f"--train-iters 3 --save {tmp_path / 'save'} --save-interval 3 --balance-report {tmp_path}"
    ours = train(pool, 2, f"{EP2} {BALANCE} --use-distributed-optimizer {save}", base=base, parameters=True)
    _assert_replicated(tmp_path, 3)
    weights = f"--load {tmp_path / 'save'} --finetune --no-load-optim --no-load-rng --lr 0 --train-iters 1"
    for ranks in (1, 4):
        layout = f"--expert-model-parallel-size {ranks}"
        theirs = train_plainly(pool, ranks, [*base, *weights.split(), *layout.split()], tmp_path)
        assert theirs.parameters.keys() == ours.parameters.keys()
        for name, values in ours.parameters.items():
            assert np.array_equal(theirs.parameters[name], values), f"{name} on {ranks} ranks"


def test_evaluation_in_between(pool, corpus, tmp_path):
    """It runs on home experts alone, and training goes on as without it."""
    base = [*MODEL, *corpus, *EXACT, *EXPERTS, *EP2.split(), "--split", "80,20,0", "--train-iters", "5"]
    evaluated = "--eval-interval 2 --eval-iters 2"
    reference = train(pool, 2, evaluated, base=base, parameters=True)
    for mode in ("resident", "shared"):
        balance = f"{BALANCE} {settings('experts', replica_mode=mode)} --balance-report {tmp_path / mode}"
        balanced = train(pool, 2, f"{evaluated} {balance}", base=base, parameters=True)
        _assert_replicated(tmp_path / mode, 2)
        assert max(differences(balanced, reference)) <= 1e-12
        np.testing.assert_allclose(balanced.validation, reference.validation, rtol=1e-12)
    assert len(reference.validation) >= 2


def _train_each_step_twice(argv: list[str]) -> RankRun:
    """As Megatron does when a loss looks wrong: the schedule again within the same step, and its gradients count."""
    from megatron.training import training

    original = training.train_step

    @functools.wraps(original)
    def train_step(*args: Any, **kwargs: Any) -> Any:
        forward_step, data, model, *rest, schedule = args

        def twice(*passed: Any, **named: Any) -> Any:
            schedule(*passed, **named)
            for chunk in model:
                chunk.zero_grad_buffer()
            return schedule(*passed, **named)

        return original(forward_step, data, model, *rest, twice, **kwargs)

    training.train_step = train_step
    return train_rank(argv, True)


@pytest.mark.parametrize("more", ["--overlap-grad-reduce", settings("experts", replica_mode="shared")])
def test_a_schedule_that_is_repeated(pool, corpus, tmp_path, more):
    base = [*MODEL, *corpus, *EXACT, *EXPERTS, *EP2.split(), "--train-iters", "4"]
    balance = [BALANCE, *more.split(), "--balance-report", str(tmp_path)]
    balanced = join(pool.run(2, _train_each_step_twice, [*base, *balance]))
    _assert_replicated(tmp_path, 2)
    assert max(differences(balanced, join(pool.run(2, _train_each_step_twice, base)))) <= 1e-12


@pytest.fixture(scope="module")
def uninterrupted(pool, corpus) -> Run:
    return train(pool, 2, f"{EP2} {BALANCE} --train-iters 6", base=[*MODEL, *corpus, *EXACT, *EXPERTS])


def _killed_in_transfer(argv: list[str], method: str, iteration: int, victim: int) -> str:
    """Train until the victim kills itself in an iteration (from 0), right after it has begun to move weights (method
    prefetch) or gradients (_start_reduction) of a layer with replicas.

    Returns what ended the training of this rank. The victim is a process of its own: of a rank that ended badly, the
    pool would not wait for what the others have to say.
    """
    from megatron.balanced.trainer.watchdog.failure import report_failures_once

    if int(os.environ["RANK"]) == victim:
        if (process := os.fork()) != 0:
            return signal.Signals(os.WTERMSIG(os.waitpid(process, 0)[1])).name
        _plant_death(method, iteration)
    ended = "the end"
    try:
        with report_failures_once():
            train_rank(argv, False)
    except SystemExit as error:
        ended = f"{type(error).__name__}: {error}"
    if int(os.environ["RANK"]) == victim:
        os._exit(1)
    return ended


def _plant_death(method: str, iteration: int) -> None:
    from balancing.experts.engine.slots import ReplicaSlots

    begin_step, transfer = ReplicaSlots.begin_step, getattr(ReplicaSlots, method)
    iterations = -1

    @functools.wraps(begin_step)
    def begin(*args: Any, **kwargs: Any) -> Any:
        nonlocal iterations
        iterations += 1
        return begin_step(*args, **kwargs)

    @functools.wraps(transfer)
    def transfer_and_die(slots: ReplicaSlots, number: int, *args: Any, **named: Any) -> None:
        transfer(slots, number, *args, **named)
        if iterations >= iteration and 0 <= number < len(slots.homes.parameters) and slots.is_used(number):
            os.kill(os.getpid(), signal.SIGKILL)

    ReplicaSlots.begin_step = begin
    replace_name(ReplicaSlots, method, transfer_and_die)


@pytest.mark.parametrize(
    "method",
    [pytest.param("prefetch", id="Trans"), pytest.param("_start_reduction", id="Agg", marks=pytest.mark.exhaustive)],
)
def test_a_rank_killed_while_replicas_move(pool, corpus, tmp_path, uninterrupted, method):
    """All ranks stop, one line names the dead one, and a run from the last checkpoint repeats the undisturbed one."""
    victim, base = 1, [*MODEL, *corpus, *EXACT, *EXPERTS, *EP2.split(), BALANCE, "--train-iters", "6"]
    save = ["--save", str(tmp_path / "save"), "--save-interval", "2"]
    ended = pool.run(2, _killed_in_transfer, [*base, *save], method, 4, victim)
    assert ended[victim] == "SIGKILL"
    assert ended[1 - victim] == "SystemExit: 1"
    told = "".join(pool.output)
    assert told.count("pretrain_gpt.py: error:") == 1, told[-3000:]
    assert f"rank {victim} died or stopped answering" in told
    assert os.listdir(tmp_path / "save")
    resumed = train(pool, 2, f"--load {tmp_path / 'save'}", base=base)
    np.testing.assert_allclose(resumed.losses, uninterrupted.losses[4:], rtol=1e-12)
    assert len(resumed.losses) == 2

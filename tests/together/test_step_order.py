"""The page of a step (`megatron.balanced.run.step`) beside the order in which all balancers were called in real runs,
in Megatron-LM's trainer and in another loop."""

import inspect
import re
from pathlib import Path
from typing import Any

from tests.support.leave_out import leave_out
from tests.support.training import EXACT, MODEL, MOE, train_rank

LAYOUT = "--context-parallel-size 2 --pipeline-model-parallel-size 2 --expert-model-parallel-size 2"
PHASES = "begin_step between_steps adopt_plans skip_step begin_schedule end_schedule end_step".split()
BALANCERS = ["SequenceBalancer", "ExpertBalancer", "LayerBalancer"]


def _record() -> list[str]:
    """What callbacks of this process are called for from now on: "class.method", "schedule" and "step" included."""
    from megatron.balanced import run
    from megatron.balanced.experts.balancer import ExpertBalancer
    from megatron.balanced.layers.balancer import LayerBalancer
    from megatron.balanced.observe.observer import Observer
    from megatron.balanced.sequences.balancer import SequenceBalancer
    from megatron.balanced.trials.step_trials import StepTrials

    calls: list[str] = []
    for owner in (Observer, StepTrials, SequenceBalancer, ExpertBalancer, LayerBalancer):
        for name in PHASES:
            method = getattr(owner, name)

            def note(self: Any, *args: Any, name: str = name, method: Any = method) -> Any:
                calls.append(f"{type(self).__name__}.{name}")
                return method(self, *args)

            setattr(owner, name, note)
    around = run.Run.around

    def noted(self: Any, schedule: Any) -> Any:
        def called(*args: Any, **kwargs: Any) -> Any:
            calls.append("the.schedule")
            return schedule(*args, **kwargs)

        return around(self, called)

    run.Run.around = noted  # type: ignore[method-assign]
    return calls


def _trainer(argv: list[str]) -> list[str]:
    leave_out((1,))
    calls = _record()
    train_rank(argv, False)
    return calls


def _plain(folder: Path) -> list[str]:
    from tests.support.plain_loop import train

    calls = _record()
    train(2, folder)
    return calls


def _step(first: list[str], balancers: list[str], skipped: list[str], kept: list[str]) -> list[str]:
    """The calls of a step in the order of the page.

    first: classes whose steps begin before those of balancers.
    skipped: balancers that the step leaves out.
    kept: those of them that the schedule needs nevertheless.
    """
    active = [name for name in balancers if name not in skipped]
    within = [*first, *(name for name in balancers if name in active or name in kept)]
    phases = [
        (first, "begin_step"),  # 1
        (balancers, "between_steps"),  # 2
        (active, "adopt_plans"),  # 3
        (skipped, "skip_step"),  # 4
        (active, "begin_step"),
        (within, "begin_schedule"),  # 5
        (["the"], "schedule"),
        (within[::-1], "end_schedule"),  # 6
        ([*first, *active][::-1], "end_step"),  # 8
    ]
    return [f"{name}.{phase}" for names, phase in phases for name in names]


def test_the_trainer_follows_the_page(pool, corpus):
    argv = [*MODEL, *corpus, *EXACT, *MOE, *LAYOUT.split(), *"--balance all --train-iters 3".split()]
    argv += ["--dataloader-inter-document-masking"]
    first = ["Observer", "StepTrials"]
    whole = _step(first, BALANCERS, [], [])
    # Data loaders know in advance that a step leaves sequences out. Layers are never left out.
    without = _step(first, BALANCERS, BALANCERS[:2], BALANCERS[:1])
    for calls in pool.run(4, _trainer, argv):
        assert calls == [*whole, *without, *whole]


def test_another_loop_follows_the_page(pool, tmp_path):
    for calls in pool.run(4, _plain, tmp_path):
        assert calls == 2 * _step(["Observer"], ["ExpertBalancer", "SequenceBalancer", "LayerBalancer"], [], [])


def test_the_page_has_each_step_once():
    from megatron.balanced import run

    assert re.findall(r"\b(\d)\. [A-Z`]", inspect.getsource(run.step)) == list("12345678")

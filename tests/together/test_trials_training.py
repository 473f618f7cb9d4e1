"""Trials in training: they change no number, and what they decide happens on all ranks."""

import re
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from benchmarks.trials.cases import Case
from benchmarks.trials.real import flags_of, run_job
from tests.support.events import events_in
from tests.support.leave_out import leave_out
from tests.support.moving import Plans, move_at
from tests.support.program import parse
from tests.support.refusals import assert_refused
from tests.support.settings import settings
from tests.support.training import EXACT, MOCK_DATA, MODEL, RankRun, assert_close, join, train, train_rank, watch

EXPERTS = (
    "--swiglu --disable-bias-linear --num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 32 "
    "--num-layers 2 --expert-model-parallel-size 2"
)
BASE = [*MODEL, *MOCK_DATA, *EXACT, *EXPERTS.split(), *"--train-iters 50".split()]
SEVERAL = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 4096"
LAYERS = "--num-layers 4 --pipeline-model-parallel-size 2 --balance-layers --layer-balance-interval 100"
TRIALS = settings("trials", share=1.0)  # so short a run has none otherwise


def _used(folder) -> dict[int, bool]:
    """Iteration (from 1) -> whether a layer had replicas. Iterations that left them out are missing."""
    used: dict[int, bool] = {}
    for line in events_in(folder):
        if line["unit"] == "layer" and line["action"] in ("keep", "replicate"):
            used[line["iteration"]] = used.get(line["iteration"], False) or line["action"] == "replicate"
    return used


@pytest.mark.parametrize(
    "flags, mode",
    [("", "resident"), (f"{SEVERAL} --pipeline-model-parallel-size 2", "shared")],
    ids=["EP 2, resident slots", "buckets, PP 2, shared slots"],
)
def test_trials_change_no_number(pool, tmp_path, flags, mode):
    ranks, flags = 8 if flags else 4, f"{flags} --global-batch-size 8"  # two groups plan apart, on two micro-batches
    balance = f"--balance-experts {settings('experts', replica_mode=mode)} {TRIALS} --balance-report {tmp_path}"
    run = train(pool, ranks, f"{flags} {balance}", base=BASE, parameters=True)
    assert_close(run, train(pool, ranks, flags, base=BASE, parameters=True))
    used = _used(tmp_path)
    assert sum(used.get(iteration, False) for iteration in range(3, 29)) > 9, (
        "replicas were hardly used, so nothing was tested"
    )
    for iteration in range(9, 29, 2):
        assert len({iteration, iteration + 1} & used.keys()) == 1, "a pair is one step with and one without"
    (line,) = events_in(tmp_path, action="trial")
    assert line["pairs"] == 10 and 0 < line["gain_low"] <= line["gain"] <= line["gain_high"]


def _remember_trials() -> list[Any]:
    """The trials that runs of this process make from now on."""
    from megatron.balanced.trials.step_trials import StepTrials

    made, init = [], StepTrials.__init__

    def remember(self: Any, *args: Any, **kwargs: Any) -> None:
        made.append(self)
        init(self, *args, **kwargs)

    StepTrials.__init__ = remember  # type: ignore[method-assign]
    return made


def _with_times(argv: list[str], slower: float) -> tuple[RankRun | None, str]:
    """Train this rank on a clock by which a step with replicas takes `slower` times as long as one without. Returns
    the run, or None if it stops early, and what was printed."""
    import contextlib
    import io

    from megatron.balanced.trials import step_trials as trials

    made = _remember_trials()

    class Clock:
        def mark(self) -> float:
            return 1.0 if made[-1].run.left_out else slower

        def seconds(self, origin: float, begin: float, end: float) -> tuple[float, float, float]:
            return 0.0, end, end

    trials.CpuClock = Clock  # type: ignore[misc,assignment]
    run = None
    with contextlib.redirect_stdout(io.StringIO()) as said, contextlib.suppress(SystemExit):
        run = train_rank(argv, True)
    return run, said.getvalue()


@pytest.mark.parametrize("slower, stays", [(1.25, False), (0.8, True)])
def test_only_what_pays_stays_on(pool, tmp_path, slower, stays):
    argv = [*BASE, "--balance-experts", *TRIALS.split(), "--balance-report", str(tmp_path)]
    found = pool.run(2, _with_times, argv, slower)
    used = _used(tmp_path)
    assert any(used.get(iteration, False) for iteration in range(41, 47)) == stays
    assert (used.keys() >= {*range(41, 47)}) == stays
    said = "".join(text for _, text in found)
    assert said.count("> experts off: with it steps take 1.25x (1.25 to 1.25, 10 pairs) the time") == (not stays)
    assert f"> gained, by the clock: experts {1 / slower:.2f}x" in said


@pytest.mark.parametrize("saved", [42, 20], ids=["after a decision", "in a round"])
def test_a_resumed_run_goes_on_with_the_trials(pool, tmp_path, saved):
    """What was off stays off, and no round begins anew; where a round was cut off, nothing is decided by its rest."""
    save = f"--save {tmp_path / 'checkpoint'} --save-interval {saved} --ckpt-format torch_dist"
    argv = [*BASE, "--balance-experts", *TRIALS.split(), *save.split()]
    pool.run(2, _with_times, [*argv, "--exit-interval", str(saved)], 1.25)
    again = [*argv, "--load", str(tmp_path / "checkpoint"), "--balance-report", str(tmp_path / "report")]
    found = pool.run(2, _with_times, again, 1.25)
    said = "".join(text for _, text in found)
    assert said.count("> experts off, as trials had decided when the checkpoint was saved") == (saved == 42)
    assert "gained, by the clock" not in said and "takes 1.25x" not in said
    used = _used(tmp_path / "report")
    assert (not used) if saved == 42 else (used.keys() >= {*range(saved + 1, 47)})
    alone = train(pool, 2, base=BASE, parameters=True)
    assert_close(join([run for run, _ in found]), replace(alone, losses=alone.losses[saved:]))


LEFT_OUT = (2, 3, 6)


def _operations(argv: list[str]) -> list[Counter[str]]:
    """Train this rank and leave experts out of some steps. Returns what the schedule of each step ran on tensors,
    messages included."""
    from torch.utils._python_dispatch import TorchDispatchMode

    from megatron.balanced.shared.callbacks import StepCallback

    found: list[Counter[str]] = []

    class Counts(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            found[-1][str(func)] += 1
            return func(*args, **(kwargs or {}))

    class OfSchedules(StepCallback):
        def begin_schedule(self) -> None:
            found.append(Counter())
            self.counts = Counts()
            self.counts.__enter__()

        def end_schedule(self) -> None:
            self.counts.__exit__(None, None, None)

    leave_out(LEFT_OUT)
    train_rank(argv, False, callbacks=[OfSchedules()])
    return found


@pytest.mark.parametrize("flags", ["", f"{SEVERAL} --pipeline-model-parallel-size 2"], ids=["EP 2", "buckets, PP 2"])
def test_a_step_that_is_left_out_does_what_megatron_does(pool, flags):
    argv = [*BASE, *f"{flags} --train-iters 8".split()]
    ranks = 8 if flags else 2
    plain = pool.run(ranks, _operations, argv)
    balanced = pool.run(ranks, _operations, [*argv, "--balance-experts"])
    assert all(of_rank[0] for of_rank in plain)
    with_replicas = 0
    for expected, found in zip(plain, balanced, strict=True):
        assert len(expected) == len(found) == 8
        for step in LEFT_OUT:
            assert found[step] == expected[step], f"step {step}"
        with_replicas += sum(found[step] != expected[step] for step in (4, 5, 7))
    assert with_replicas == 3 * ranks, "nothing was left out"


def _until_it_stops(argv: list[str]) -> int:
    """Train this rank. Returns the number of its steps; Megatron-LM ends the process when it stops early."""
    args, config, train = parse(argv)
    finish = watch(False)
    with pytest.raises(SystemExit, match="0"):
        train(args, config)
    return len(finish().losses)


def test_a_run_of_trials_stops_by_itself(pool, tmp_path):
    argv = [*BASE, *f"--balance-experts --balance-trial 16 --balance-report {tmp_path}".split()]
    assert pool.run(2, _until_it_stops, argv) == [16, 16]
    (line,) = events_in(tmp_path, action="trial")
    assert line["pairs"] == 7
    shown = " ".join(_report(tmp_path).split())
    assert re.match(rf"by the clock Balancing gained: experts {line['gain']:.2f}x \(.* 7 pairs\)", shown)


def test_a_run_of_trials_stops_where_the_user_says(pool, tmp_path):
    """At a multiple of --exit-interval, if the trials are not over by then, also after a resume."""
    argv = [*BASE, *"--balance-experts --balance-trial 16".split()]
    for every, steps in ((6, 6), (8, 8), (16, 16), (40, 16)):
        save = ["--save", str(tmp_path / str(every)), "--save-interval", "100"]
        found = pool.run(2, _until_it_stops, [*argv, *save, "--exit-interval", str(every)])
        assert found == [steps, steps], every
    again = [*argv, "--load", str(tmp_path / "8"), "--exit-interval", "6"]
    assert pool.run(2, _until_it_stops, again) == [4, 4], "from iteration 8 to 12"


SEVERAL_TRIED = "--balance experts,sequences --context-parallel-size 2 --sequence-domain context"
# Flags, and what the line must say. No run of trials ends without a word.
NOTHING_TO_TRY = {
    "no step": ("--balance-experts --skip-train", "--balance-trial 16", "--skip-train trains no step", "drop it"),
    "one rank has all": (
        "--balance-experts --expert-model-parallel-size 1",
        "--balance-trial 16",
        "--balance-experts has nothing to balance",
        "--expert-model-parallel-size 1",
    ),
    "no experts": ("--balance all --num-experts 0 --expert-model-parallel-size 1", "--balance-trial 16", "no experts"),
    "layers alone": (f"{LAYERS} --expert-model-parallel-size 1", "--balance-trial 16", "add --balance-experts"),
    "one step": ("--balance-experts --balance-trial 1", "--balance-trial 1", "use at least 4"),
    "half a block": (f"{SEVERAL_TRIED} --balance-trial 5", "--balance-trial 5", "experts and sequences", "at least 6"),
}


def test_trials_of_nothing_are_refused(pool):
    assert_refused(pool, [*BASE, "--balance-trial", "16"], NOTHING_TO_TRY)


def _trials_of_what_cannot_be_left_out(argv: list[str]) -> tuple[object, str]:
    import contextlib
    import io

    from megatron.balanced.experts.balancer import ExpertBalancer

    ExpertBalancer.name = None  # type: ignore[assignment]  # as with graphs of whole iterations
    said = io.StringIO()
    args, config, train = parse(argv)
    with contextlib.redirect_stderr(said), pytest.raises(SystemExit) as stopped:
        train(args, config)
    return stopped.value.code, said.getvalue()


def test_what_the_model_tells_late_is_refused_as_well(pool):
    found = pool.run(2, _trials_of_what_cannot_be_left_out, [*BASE, *"--balance-experts --balance-trial 16".split()])
    assert [code for code, _ in found] == [2, 2]
    (line,) = [line for _, said in found for line in said.splitlines() if "error" in line]
    assert line.startswith("pretrain_gpt.py: error: --balance-trial 16 has nothing to try: no balancer")


def test_a_run_that_ends_before_its_trials_says_so(pool):
    argv = [*BASE, *"--balance-experts --balance-trial 16 --train-iters 3".split()]
    (said,) = {text for _, text in pool.run(2, _with_times, argv, 1.0) if text.count("by the clock")}
    assert "> gained, by the clock: unknown, since the run ended before --balance-trial 16 had a pair" in said


def _report(folder: Any) -> str:
    import io

    from balancing.report.history import read_history
    from balancing.report.summary import summarize
    from balancing.report.table import print_summary

    text = io.StringIO()
    print_summary(summarize(read_history(folder)), text)
    return text.getvalue()


def _with_layers(argv: list[str], moves: Plans, left_out: tuple[int, ...]) -> tuple[str, list[int]]:
    """Train this rank with layers that move, on a clock by which steps take 1.2 s at first, long around a move, and 1 s
    afterwards. Returns what was printed, and the iterations that layers were planned from."""
    import contextlib
    import io

    from megatron.balanced.layers.planning import LayerPlanner
    from megatron.balanced.trials import step_trials as trials

    made = _remember_trials()
    first, planned, add = min(moves, default=100), [], LayerPlanner.add

    class Clock:
        def mark(self) -> float:
            here = made[-1]
            return 1.2 if here._iteration < first else 50.0 if here._iteration < first + 4 else 1.0

        def seconds(self, origin: float, begin: float, end: float) -> tuple[float, float, float]:
            return 0.0, end, end

    def added(self: Any, iteration: int, *rest: Any, **named: Any) -> None:
        planned.append(iteration)
        add(self, iteration, *rest, **named)

    trials.CpuClock = Clock  # type: ignore[misc,assignment]
    LayerPlanner.add = added  # type: ignore[method-assign]
    if moves:
        move_at(moves)
    if left_out:
        leave_out(left_out)
    with contextlib.redirect_stdout(io.StringIO()) as said:
        train_rank(argv, False)
    return said.getvalue(), planned


def test_steps_before_a_move_of_layers_are_compared_with_steps_after_it(pool, tmp_path):
    """Without the step of the move, and without those in which layers settle."""
    argv = [*MODEL, *MOCK_DATA, *f"{LAYERS} --train-iters 40 --balance-report {tmp_path}".split()]
    said = "".join(text for text, _ in pool.run(2, _with_layers, argv, {15: ((3,), (1,))}, ()))
    assert said.count("> gained, by the clock: layers 1.20x (1.20 to 1.20, 10 pairs)\n") == 1
    (line,) = events_in(tmp_path, balancer="layers", action="trial")
    assert line["pair_ratios"] == pytest.approx([1.2] * 10) and {*line["pair_iterations"]} == {29}


def test_steps_before_a_round_of_trials_are_not_compared_with_steps_after_a_move_behind_it(pool):
    """They may have run with balancers that the round has switched off. Too few steps are left between the two."""
    argv = [*BASE, *f"{LAYERS} --train-iters 50 --balance-experts".split()]
    said = "".join(text for text, _ in pool.run(4, _with_layers, argv, {30: ((3,), (1,))}, ()))
    (line,) = [line for line in said.splitlines() if "by the clock" in line]
    assert "experts" in line and "layers" not in line


def test_layers_are_not_planned_from_steps_that_leave_experts_out(pool):
    argv = [*BASE, *f"{LAYERS} --train-iters 12 --balance-experts".split()]
    for _, planned in pool.run(4, _with_layers, argv, {}, (4, 5, 8)):
        assert planned == [1, 2, 3, 6, 7, 9]


def _real_case(argv: list[str], case: Case) -> dict[str, Any]:
    args, config, _ = parse(argv)
    return run_job(case, args, config)


@pytest.mark.parametrize("loads, imbalance", [("even", 1.03), ("uneven", 1.6)])
def test_the_benchmark_makes_the_loads_of_its_cases(pool, tmp_path, loads, imbalance):
    case = Case("any", 10, {"experts": True}, loads)
    argv = [*flags_of(case), *f"--mock-data --train-iters 10 --balance-report {tmp_path}".split()]
    row, _ = pool.run(2, _real_case, argv, case)
    assert row["steps"] == 10 and row["on"] == {"experts": True} and row["gains"] == {} and row["cost"] == 0
    before = [line["imbalance_before"] for line in events_in(tmp_path, balancer="experts")]
    assert sum(before) / len(before) == pytest.approx(imbalance, rel=0.05)

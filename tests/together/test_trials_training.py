"""Trials in training: they change no number, and what they decide happens on all ranks."""

import re
from typing import Any

import pytest

from tests.support.events import events_in
from tests.support.program import parse
from tests.support.settings import settings
from tests.support.training import EXACT, MOCK_DATA, MODEL, RankRun, assert_close, train, train_rank, watch

EXPERTS = (
    "--swiglu --disable-bias-linear --num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 32 "
    "--num-layers 2 --global-batch-size 8 --expert-model-parallel-size 2"
)
BASE = [*MODEL, *MOCK_DATA, *EXACT, *EXPERTS.split(), *"--train-iters 46".split()]
SEVERAL = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 4096"
TRIALS = settings("trials", share=1.0)  # so short a run has none otherwise


def _used(folder) -> dict[int, bool]:
    """Iteration (from 1) -> whether a layer had replicas."""
    used: dict[int, bool] = {}
    for line in events_in(folder):
        if line["unit"] == "layer" and line["action"] in ("keep", "replicate"):
            used[line["iteration"]] = used.get(line["iteration"], False) or line["action"] == "replicate"
    return used


@pytest.mark.parametrize("flags", ["", f"{SEVERAL} --pipeline-model-parallel-size 2"], ids=["EP 2", "buckets, PP 2"])
def test_trials_change_no_number(pool, tmp_path, flags):
    ranks = 8 if flags else 4  # two groups plan apart
    run = train(
        pool, ranks, f"{flags} --balance-experts {TRIALS} --balance-report {tmp_path}", base=BASE, parameters=True
    )
    assert_close(run, train(pool, ranks, flags, base=BASE, parameters=True))
    used = _used(tmp_path)
    assert sum(used[iteration] for iteration in range(3, 21)) > 9, "replicas were hardly used, so nothing was tested"
    left_out = {line["iteration"] for line in events_in(tmp_path, reason="a trial left replicas out")}
    assert len(left_out) > 6 and min(left_out) > 20  # by the clock they may stay out at the end
    for iteration in range(21, 41, 2):
        assert len({iteration, iteration + 1} & left_out) <= 1 and not (used[iteration] and used[iteration + 1])
    (line,) = events_in(tmp_path, action="trial")
    assert line["pairs"] == 10 and 0 < line["gain_low"] <= line["gain"] <= line["gain_high"]


def _with_times(argv: list[str], slower: float) -> tuple[RankRun, str]:
    """Train this rank on a clock by which a step with replicas takes `slower` times as long as one without. Returns
    what was printed, too."""
    import contextlib
    import io

    from megatron.balanced.observe import trials
    from megatron.balanced.shared.callbacks import registered

    class Clock:
        def mark(self) -> float:
            (experts,) = (callback for callback in registered if getattr(callback, "trial_name", None) == "experts")
            return 1.0 if experts.left_out else slower

        def seconds(self, origin: float, begin: float, end: float) -> tuple[float, float, float]:
            return 0.0, end, end

    trials.CpuClock = Clock  # type: ignore[misc,assignment]
    with contextlib.redirect_stdout(io.StringIO()) as said:
        run = train_rank(argv, True)
    return run, said.getvalue()


@pytest.mark.parametrize("slower, stays", [(1.25, False), (0.8, True)])
def test_only_what_pays_stays_on(pool, tmp_path, slower, stays):
    argv = [*BASE, "--balance-experts", *TRIALS.split(), "--balance-report", str(tmp_path)]
    found = pool.run(2, _with_times, argv, slower)
    used = _used(tmp_path)
    assert any(used[iteration] for iteration in range(41, 47)) == stays
    said = "".join(text for _, text in found)
    assert said.count("> experts off: with it steps take 1.25x (1.25 to 1.25, 10 pairs) the time") == (not stays)
    assert f"> gained, by the clock: experts {1 / slower:.2f}x" in said


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


def _report(folder: Any) -> str:
    import io

    from balancing.report.history import read_history
    from balancing.report.summary import summarize
    from balancing.report.table import print_summary

    text = io.StringIO()
    print_summary(summarize(read_history(folder)), text)
    return text.getvalue()

"""The estimate for perfect balance is near the step time of the same run with equal work."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from balancing.report import Summary, read_history, summarize
from balancing.report.estimate import ExpertLoad, StepLoad, estimate, pipeline_seconds
from balancing.report.findings import verdict
from tests.support.made_up_run import Job, write_run


def summary_of(directory: Path, job: Job) -> Summary:
    return summarize(read_history(write_run(directory, job, 12)))


@pytest.mark.parametrize("busy", [[1, 1, 1, 1], [1, 1, 2, 1], [1, 2, 1, 1, 1, 1], [3, 1], [1, 1.2, 1.4, 1.6], [1]])
@pytest.mark.parametrize("recompute", [False, True])
def test_pipeline_model_against_the_exact_schedule(busy, recompute):
    m, forward = 16, 1 / 4 if recompute else 1 / 3
    calls = Job(micro_batches=m, recompute=recompute).schedule([seconds / m * forward for seconds in busy])
    exact = max(start + length for stage in calls for _, _, start, length in stage)
    assert pipeline_seconds(np.array(busy, float)[:, None], m, 1, forward) == pytest.approx(exact, rel=0.03)


def test_pipeline_model_never_strays_far_from_the_exact_schedule():
    draw = np.random.default_rng(0)
    for _ in range(200):
        stages = int(draw.integers(2, 13))
        m = int(draw.integers(max(stages, 4), 49))
        busy = draw.uniform(0.5, 1.5, stages)
        busy[draw.integers(stages)] *= draw.uniform(1, 3)
        calls = Job(micro_batches=m).schedule(list(busy / m / 3))
        exact = max(start + length for stage in calls for _, _, start, length in stage)
        assert 0.94 * exact < pipeline_seconds(busy[:, None], m, 1, 1 / 3) < 1.0001 * exact


def test_interleaving_divides_the_fill():
    assert pipeline_seconds(np.ones((4, 1)), 8, 1, 1 / 3) == pytest.approx(1 + 3 / 8)
    assert pipeline_seconds(np.ones((4, 1)), 8, 3, 1 / 3) == pytest.approx(1 + 3 / 24)


def test_estimates_by_hand():
    """Two stages of two replicas, many micro-batches: the slowest rank is the step, plus 1 second of anything else."""
    busy = np.array([[4.0, 2.0], [2.0, 2.0]])
    load = StepLoad(5.0, busy, np.zeros((2, 2), int), np.inf, 1, 1 / 3, {})
    seconds = {one.balanced: one.step_seconds for one in estimate(load)}
    # stages scaled to the mean 2.5: 4 becomes 4 * 2.5 / 3; ranks of stage 0 level: 3; all level: 2.5
    expected = {"stages": 1 + 10 / 3, "sequences": 1 + 3.0, "all": 1 + 2.5, "no idle": 2.5}
    assert seconds == pytest.approx(expected)


def test_balanced_stages_against_the_run_that_is_level(tmp_path):
    job = Job(replicas=1, experts=0, layers=4, slow={1: 2.0}, noise=0.0)
    uneven = summary_of(tmp_path / "uneven", job)
    level = summary_of(tmp_path / "level", replace(job, slow={}, forward=job.forward * 5 / 4))
    predicted = {one.balanced: one.step_seconds for one in uneven.estimates}
    assert uneven.step_seconds and level.step_seconds and level.step_seconds < 0.8 * uneven.step_seconds
    assert predicted["stages"] == pytest.approx(level.step_seconds, rel=0.03)


def test_balanced_experts_against_the_run_that_is_level(tmp_path):
    """Hot on rank 0 in one layer and on rank 1 in the next: rank totals are alike, yet every layer waits."""
    job = Job(stages=2, layers=4, hot={(0, 0): 20.0, (1, 7): 20.0, (2, 0): 20.0, (3, 7): 20.0}, noise=0.0)
    uneven = summary_of(tmp_path / "uneven", job)
    level = summary_of(tmp_path / "level", replace(job, hot={}))
    predicted = {one.balanced: one for one in uneven.estimates}
    assert uneven.rank and uneven.rank.over < 1.02
    assert uneven.step_seconds and level.step_seconds and level.step_seconds < 0.75 * uneven.step_seconds
    assert predicted["experts"].step_seconds == pytest.approx(level.step_seconds, rel=0.05)
    assert not predicted["experts"].at_best and predicted["sequences"].saved < 0.02
    assert "waits for expert-parallel" in verdict(uneven)


def test_a_slow_rank_is_not_blamed_on_experts(tmp_path):
    summary = summary_of(tmp_path, Job(stages=2, rank_slow={1: 1.5}))
    saved = {one.balanced: one.saved for one in summary.estimates}
    assert saved["experts"] < 0.02 < 0.1 < saved["sequences"]


def test_experts_hidden_from_the_clock_give_an_upper_bound():
    experts = {0: ExpertLoad(0, np.array([0.5, 0.5]), np.array([300.0, 100.0]))}
    load = StepLoad(1.0, np.ones((1, 2)), np.array([[0, 1]]), 2, 1, 1 / 3, experts)
    (found,) = (one for one in estimate(load) if one.balanced == "experts")
    # 2 micro-batches of 0.5 s wait for a rank with 1.5 times the mean
    assert found.at_best and found.step_seconds == pytest.approx(2 / 3)

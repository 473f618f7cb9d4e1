"""Trials of balancers: which steps leave out what, and what is decided from their seconds."""

import math
import pickle

import numpy as np
import pytest

from balancing.settings import SettingError
from balancing.trials import ClockGain, LeftOut, TrialConfig, Trials, TrialSchedule, Verdict, median_gain, product
from benchmarks.trials.cases import CASES, Watch
from benchmarks.trials.emulated import RANKS, Work
from benchmarks.trials.real import CONFIG, steps_of


class Job:
    """A job whose steps take a known time: 1 s, times `slower` of each balancer that is left out, and noise."""

    def __init__(self, slower, steps, *, noise=0.02, config=None, first=0, seconds=None, seed=0, delays=None):
        schedule = TrialSchedule(list(slower), config or TrialConfig(), steps=steps, first=first, seed=seed)
        self.trials = Trials(schedule, delays, switched := [0] * len(slower))
        told, self.switched = [LeftOut(schedule, name, switched) for name in slower], switched
        self.ran, self.verdicts = [], {}
        random = np.random.default_rng(seed)
        for iteration in range(first, first + steps):
            left_out = self.trials.left_out(iteration)
            assert left_out == {one.name for one in told if one(iteration)}, "one that is told in advance differs"
            self.ran.append(left_out)
            took = math.prod(slower[name](iteration) if callable(slower[name]) else slower[name] for name in left_out)
            took *= math.exp(noise * random.normal())
            if seconds is not None:
                took *= seconds(iteration)
            if self.trials.is_trial(iteration):
                self.trials.add(iteration, took)
                if self.trials.ends_round(iteration):
                    self.verdicts[iteration] = self.trials.decide(iteration)

    def share(self, name):
        return sum(name in left_out for left_out in self.ran) / len(self.ran)


def test_what_makes_steps_longer_is_switched_off_in_the_first_round():
    job = Job({"experts": 0.9}, 1000)
    (verdict,), *_ = job.verdicts.values()
    assert not verdict.on and verdict.changed
    assert verdict.gain.low < 0.9 < verdict.gain.high < 1
    after = min(job.verdicts) + 1
    assert all(left_out == {"experts"} for left_out in job.ran[after:])


def test_what_makes_steps_shorter_stays_on():
    job = Job({"experts": 1.3}, 3500)
    assert all(verdict.on and not verdict.changed for found in job.verdicts.values() for verdict in found)
    assert len(job.verdicts) == 4
    gain = job.trials.gains()["experts"]
    assert gain.low < 1.3 < gain.high and gain.high / gain.low < 1.1
    assert job.share("experts") <= 0.01


def test_a_load_that_becomes_even_is_noticed_at_the_next_round_and_so_is_its_return():
    job = Job({"experts": lambda iteration: 1.2 if iteration < 200 or iteration > 3500 else 0.95}, 6000)
    states = {iteration: found[0].on for iteration, found in job.verdicts.items()}
    assert [on for iteration, on in states.items() if iteration < 200] == [True]
    assert not any(on for iteration, on in states.items() if 1500 < iteration < 3500)
    assert [on for iteration, on in states.items() if iteration > 5000] == [True]
    assert [verdict.changed for found in job.verdicts.values() for verdict in found].count(True) == 2


def test_of_two_balancers_only_the_one_that_pays_stays_on():
    job = Job({"experts": 1.25, "sequences": 0.93}, 3000)
    assert [verdict.on for verdict in job.verdicts[min(job.verdicts)]] == [True, False]
    assert job.ran[-1] == {"sequences"}
    found = job.trials.gains()
    assert found["together"].low < 1.25 * 0.93 < found["together"].high


def test_a_block_has_each_combination_once_in_an_order_that_is_drawn():
    orders = set()
    for seed in range(20):
        job = Job({"experts": 1.0, "sequences": 1.0}, 1000, seed=seed)
        (end,) = job.verdicts
        ran = job.ran[8 : end + 1]
        for block in range(0, len(ran), 4):
            assert len({*ran[block : block + 4]}) == 4
        orders.add(tuple(ran[:4]))
        again = Trials(TrialSchedule(["experts", "sequences"], TrialConfig(), steps=1000, seed=seed))
        assert [again.left_out(iteration) for iteration in range(8, end + 1)] == ran, "ranks would differ"
    assert len(orders) > 10


def test_a_slow_step_and_a_noisy_job_decide_nothing_wrong():
    slow = Job({"experts": 1.1}, 1000, noise=0.005, seconds=lambda iteration: 10.0 if iteration == 15 else 1.0)
    assert slow.verdicts[min(slow.verdicts)][0].on
    gain = slow.trials.gains()["experts"]
    assert gain.low > 1.05 and gain.high < 1.15, "one slow step moves the interval"
    wrong = 0
    for seed in range(200):
        (verdict,) = next(iter(Job({"experts": 1.0}, 1000, noise=0.3, seed=seed).verdicts.values()))
        wrong += not verdict.on
    assert wrong <= 10, f"{wrong} of 200 balancers that change nothing were switched off"


@pytest.mark.parametrize("steps", [1, 20, 49])
def test_a_short_job_has_no_trials(steps):
    job = Job({"experts": 0.5}, steps)
    assert job.verdicts == {} and not any(job.ran)


@pytest.mark.parametrize("names", [["experts"], ["experts", "sequences"], ["a", "b", "c"]])
@pytest.mark.parametrize("steps", [50, 1000, 2400, 5000, 20000])
def test_trials_never_take_more_than_the_first_round_or_their_share(names, steps):
    job = Job(dict.fromkeys(names, 1.1), steps, first=123)
    assert sum(bool(left_out) for left_out in job.ran[:30]) <= 15
    assert sum(bool(left_out) for left_out in job.ran) <= max(15, 0.01 * steps)
    for name in names:
        assert sum(name in left_out for left_out in job.ran[:30]) <= 10


@pytest.mark.parametrize("names", [["experts"], ["experts", "sequences"], ["a", "b", "c"]])
@pytest.mark.parametrize("steps", [50, 100, 700])
def test_every_job_has_decided_by_its_step_30(names, steps):
    """Whatever does not pay is off from there on, which a short job gains from, too."""
    job = Job(dict.fromkeys(names, 0.9), steps, noise=0.01)
    assert len(job.verdicts) == 1 and max(job.verdicts) < 30
    assert all(left_out == {*names} for left_out in job.ran[30:])


def test_where_balance_cannot_gain_only_a_gain_keeps_a_balancer_on():
    """On ranks that share cores. One that changes nothing would stay on elsewhere."""
    for gain, elsewhere in ((1.0, True), (1.2, True), (0.8, False)):
        for can_gain in (True, False):
            trials = Trials(TrialSchedule(["experts"], TrialConfig(), steps=100), can_gain=can_gain)
            for iteration in range(30):
                noise = 1 + 0.01 * (iteration % 4 > 1)  # as often in one as in the other step of a pair
                trials.add(iteration, noise * (gain if trials.left_out(iteration) else 1.0))
            (verdict,) = trials.decide(29)
            assert verdict.on == (elsewhere if can_gain else gain > 1)


@pytest.mark.parametrize("slower", [{"experts": 0.8}, {"experts": 0.8, "sequences": 0.9}])
def test_what_is_off_runs_no_more_than_its_share(slower):
    job = Job(slower, 20000)
    first = min(job.verdicts)
    assert sum(left_out != frozenset(slower) for left_out in job.ran[first + 1 :]) <= 0.01 * 20000


def test_moves_of_layers_are_compared_by_themselves_and_multiplied():
    trials = Trials(TrialSchedule(["experts"], TrialConfig(steps=40)))
    trials.add_move(30, [9.0, *[1.2] * 9], [1.0] * 10)  # the first step is compared with the last
    assert trials.gains() == {"layers": ClockGain(*[pytest.approx(1.2)] * 3, 10)}
    assert [pair.ratio for pair in trials.pairs["layers"]] == pytest.approx([1.2] * 9 + [9.0])
    trials.add_move(60, [1.0] * 8, [1.1] * 10)
    trials.add_move(90, [5.0] * 5, [1.0] * 10)  # too few
    assert trials.gains()["layers"] == ClockGain(*[pytest.approx(1.2 / 1.1)] * 3, 8)
    for iteration in range(4, 40):
        trials.add(iteration, 1.5 if trials.left_out(iteration) else 1.0)
    assert trials.gains()["together"].ratio == pytest.approx(1.5 * 1.2 / 1.1)
    assert [*trials.gains()] == ["experts", "layers", "together"]
    assert product([ClockGain(1.2, 1.1, 1.3, 10), ClockGain(2, 1, 4, 8)]) == ClockGain(2.4, 1.1, 5.2, 8)


def test_a_schedule_does_not_depend_on_the_order_of_questions():
    asked = TrialSchedule(["experts", "sequences"], TrialConfig(), steps=9000, first=7, seed=3)
    forward = [asked.combination(iteration) for iteration in range(9000)]
    again = TrialSchedule(["experts", "sequences"], TrialConfig(), steps=9000, first=7, seed=3)
    assert [again.combination(iteration) for iteration in reversed(range(9000))] == forward[::-1]
    assert pickle.loads(pickle.dumps(asked)).combination(8020) == forward[8020] is not None


def test_a_run_that_goes_on_keeps_the_rounds_of_the_earlier_one():
    """However often a job is started again, it has no more trials; none of them is in the warm-up of a run."""
    names, config = ["experts"], TrialConfig()
    whole = TrialSchedule(names, config, steps=3000, first=100)
    for begins in (100, 110, 125, 150, 1000, 1095, 1130):
        again = TrialSchedule(names, config, steps=3000, first=100, begins=begins)
        expected = [whole.combination(i) if i >= begins + 8 else None for i in range(begins, 3000)]
        assert [again.combination(iteration) for iteration in range(begins, 3000)] == expected
    assert sum(whole.combination(iteration) is not None for iteration in range(3000)) > 40


def test_a_decision_on_what_is_prepared_in_advance_takes_effect_later():
    """Steps that have been prepared by then run as they were prepared."""
    job = Job({"sequences": 0.8}, 1000, delays={"sequences": 3})
    (end,) = job.verdicts
    assert job.ran[end + 1 : end + 4] == [frozenset()] * 3
    assert all(left_out == {"sequences"} for left_out in job.ran[end + 4 :])
    ahead = LeftOut(job.trials.schedule, "sequences", job.switched)
    assert [ahead(iteration) for iteration in (end + 3, end + 4)] == [False, True]
    again = Job(
        {"sequences": lambda iteration: 0.8 if iteration < 1000 else 1.3}, 4000, delays={"sequences": 3}, noise=0.01
    )
    on = next(iteration for iteration, (verdict,) in again.verdicts.items() if verdict.changed and verdict.on)
    assert again.ran[on + 1 : on + 5] == [{"sequences"}] * 3 + [frozenset()]


def test_without_pairs_nothing_is_tried_and_all_stays_on():
    job = Job({"experts": 0.5}, 5000, config=TrialConfig(pairs=0))
    assert not any(job.ran) and job.verdicts == {}


def test_a_run_of_trials_alone():
    job = Job({"experts": 1.2, "sequences": 1.05}, 40, config=TrialConfig(steps=40), noise=0.01)
    gains = job.trials.gains()
    assert gains["experts"].pairs == 18 and gains["together"].pairs == 9
    for name, gain in (("experts", 1.2), ("sequences", 1.05), ("together", 1.26)):
        assert gains[name].ratio == pytest.approx(gain, rel=0.02)


def test_a_block_of_which_a_step_is_missing_does_not_count():
    trials = Trials(TrialSchedule(["experts"], TrialConfig(), steps=1000))
    for iteration in range(8, 28):
        left_out = trials.left_out(iteration)
        if iteration not in (13, 20):
            trials.add(iteration, 2.0 if left_out else 1.0)
    assert trials.gains()["experts"] == ClockGain(2.0, 2.0, 2.0, 8)


def test_an_interval_needs_seven_pairs_and_holds_as_often_as_it_says():
    assert median_gain([]) is None and median_gain([1.1] * 7) == ClockGain(*[pytest.approx(1.1)] * 3, 7)
    few = median_gain([2.0] * 6)
    assert few is not None and (few.ratio, few.low, few.high) == (pytest.approx(2), 0.0, math.inf)
    ten = median_gain(range(1, 11))
    assert ten is not None and ten.low > 2 and ten.high < 9, "not narrower than that of the sign test"
    slow = median_gain([1.0, 1.1, 1.1, 1.2, 1.2, 1.2, 1.3, 1.3, 1.4, 100.0])
    assert slow is not None and (slow.low, slow.high) == (pytest.approx(1.1), pytest.approx(1.4)), "moved far"
    many = median_gain([9.0] * 1000 + [1.1, 1.2, 1.3] * 100)
    assert many is not None and (many.low, many.high, many.pairs) == (*[pytest.approx(1.2)] * 2, 300)
    random = np.random.default_rng(0)
    found = [median_gain(np.exp(np.clip(random.standard_cauchy(9), -99, 99))) for _ in range(2000)]
    missed = sum(not gain.low <= 1 <= gain.high for gain in found)
    assert missed / 2000 < 0.05
    for number, least in ((7, 0.4), (10, 0.75), (18, 0.95)):  # of 7 % beside a noise of 5 %
        gains = [median_gain(np.exp(0.07 + 0.05 * random.normal(size=number))) for _ in range(400)]
        assert sum(gain.low > 1 for gain in gains) / 400 > least


@pytest.mark.parametrize("case", CASES, ids=[case.what for case in CASES])
def test_the_bad_cases_of_the_benchmark(case):
    """Decided as they should be, with the seconds that its ranks wait."""
    ranks = [Work(case, rank) for rank in range(RANKS)]
    trials, left_out = Trials(TrialSchedule([*case.expected], TrialConfig(), steps=case.steps)), frozenset()
    for iteration in range(case.steps):
        left_out = trials.left_out(iteration)
        trials.add(iteration, max(rank.of(iteration, left_out) for rank in ranks))
        if trials.ends_round(iteration):
            trials.decide(iteration)
    assert {name: name not in left_out for name in case.expected} == case.expected


@pytest.mark.parametrize("case", CASES, ids=[case.what for case in CASES])
def test_a_real_job_of_a_case_has_a_whole_round_of_trials(case):
    trials = Trials(TrialSchedule([*case.expected], CONFIG, steps=steps_of(case)))
    for iteration in range(min(100, steps_of(case))):
        trials.add(iteration, 1.0)
    assert {len(trials.pairs[name]) for name in case.expected} == {0 if "short" in case.what else 10}


def test_the_cost_of_trials_is_what_steps_take_that_run_otherwise_than_decided():
    (case,) = (case for case in CASES if case.what == "even loads, dear transfers")
    watch, trials = Watch(case, case.steps, TrialConfig()), Trials(TrialSchedule(["experts"], TrialConfig(), steps=700))
    for iteration in range(case.steps):
        left_out = trials.left_out(iteration)
        watch.add(0.8 if left_out else 1.0, left_out)
        trials.add(iteration, 0.8 if left_out else 1.0)
        if trials.ends_round(iteration):
            trials.decide(iteration)
    row = watch.row(trials.gains())
    assert row["on"] == {"experts": False} and row["off_since"] == {"experts": 28}
    assert row["cost"] == pytest.approx(-10 * 0.2 / 700)


def test_lines_for_the_user():
    off = Verdict("sequences", ClockGain(0.96, 0.93, 0.98, 14), on=False, changed=True)
    assert str(off) == "sequences off: with it steps take 1.04x (1.02 to 1.08, 14 pairs) the time"
    on = Verdict("experts", ClockGain(1.2, 1.1, 1.3, 10), on=True, changed=True)
    assert str(on) == "experts on again: without it steps take 1.20x (1.10 to 1.30, 10 pairs) the time"
    assert (
        str(Verdict("experts", ClockGain(1.2, 0.0, math.inf, 3), on=True, changed=False))
        == "experts on: 1.20x (3 pairs)"
    )


def test_bad_input():
    with pytest.raises(ValueError, match="4 balancers cannot be tried together"):
        TrialSchedule(["a", "b", "c", "d"], TrialConfig())
    for names, steps, fewest in ((["a"], 3, 4), (["a", "b"], 5, 6), (["a", "b", "c"], 9, 10)):
        with pytest.raises(SettingError, match=f"--balance-trial {steps} is too short .* at least {fewest}"):
            TrialSchedule(names, TrialConfig(steps=steps))
        trials = Trials(TrialSchedule(names, TrialConfig(steps=fewest)))
        for iteration in range(fewest):
            trials.add(iteration, 1.0)
        assert len(trials.gains()) == len(names) + (len(names) > 1), "the fewest steps have a pair of each"
    with pytest.raises(SettingError, match="nothing to try"):
        TrialSchedule([], TrialConfig(steps=40))
    for bad in ({"pairs": -1}, {"interval": 99}, {"share": 0.0}, {"steps": -1}):
        with pytest.raises(SettingError):
            TrialConfig(**bad)

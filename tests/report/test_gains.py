"""The report must show what balancing gained: figures worked out by hand, in tables, on the page and over the run."""

import copy
import io
import json
import re
from dataclasses import replace

import numpy as np
import pytest

from balancing.report import EventLog, History, TraceLog, event, measured_lines, observe, read_history, summarize
from balancing.report import history as of_history
from balancing.report.findings import answers, basis, finding_rows, gain_rows, verdict
from balancing.report.gains import over_the_run, predicted_of_moves, predicted_of_replicas
from balancing.report.table import print_summary
from balancing_tools.report.page import page
from balancing_tools.whatif.recorded import forecast_recorded
from tests.support.made_up_run import Job

FROZEN = {0: 0.25, 1: 0.25}
BEFORE = Job(stages=2, replicas=2, layers=8, slow=FROZEN, hot={(3, 6): 8.0}, noise=0.0)
AFTER = replace(BEFORE, moved={4: 0})
MOVE = 11  # the first iteration with the new layout


def spread(iteration: int, stage: int) -> dict:
    """Two context-parallel ranks: one has three times the attention of the other, and hardly more when it is spread."""
    return event(
        iteration, "sequences", "micro-batch", imbalance_before=1.5, imbalance_after=1.01, action="spread",
        ordered_before=[1.5, 0.5], ordered_after=[1.01, 0.99], stage=stage, replica=0,
    )  # fmt: skip


def replicate(iteration: int, layer: int) -> dict:
    return event(
        iteration, "experts", "layer", imbalance_before=1.6 if layer == 3 else 1.0, imbalance_after=1.0, layer=layer,
        action="replicate" if layer == 3 else "keep", tokens_per_rank=[500, 500], replicas=int(layer == 3),
    )  # fmt: skip


def moved(iteration: int, action: str = "move", before: str = "Et*4|t*4L", after: str = "Et*5|tttL") -> dict:
    return event(
        iteration, "layers", "stage", imbalance_before=1.23, imbalance_after=1.05, action=action,
        reason="gains 9.0% of a step", layout_before=before, layout_after=after,
    )  # fmt: skip


@pytest.fixture(scope="module")
def history(tmp_path_factory) -> History:
    """Sequences and experts balanced throughout, layers moved halfway."""
    folder = tmp_path_factory.mktemp("balanced")
    trace = TraceLog(folder)
    with EventLog(folder) as log:
        for iteration in range(1, 21):
            record = (BEFORE if iteration < MOVE else AFTER).record(iteration)
            lines = observe(record) + [spread(iteration, stage) for stage in (0, 1)]
            lines += [replicate(iteration, layer) for layer in range(8)]
            log.write(lines + ([moved(MOVE)] if iteration == MOVE else []))
            trace.add(record)
    trace.write()
    return read_history(folder)


def test_gains_of_all_balancers(history):
    """Stages: layers cost 0.25, 0.25 and six times 1, so that halves are 2.5 and 4, and 3.5 and 3 after the move. The
    hot expert makes its layer slower and nothing else: the mean over replicas of its time stays the same."""
    found = {gain.balancer: (gain.before, gain.after) for gain in summarize(history).gains}
    assert found["sequences"] == (1.5, 1.01)
    assert found["experts"] == (pytest.approx((1.6 + 7) / 8), 1.0)
    assert found["layers"] == (pytest.approx(4 / 3.25), pytest.approx(3.5 / 3.25))
    series = over_the_run(history)["layers"]
    assert series[MOVE - 1][0] == series[MOVE - 1][1], "before the move there is no difference"
    assert series[MOVE][1] < series[MOVE][0] - 0.1


def test_rows_show_before_and_after(history):
    rows = {row.what: row for row in finding_rows(summarize(history))}
    assert (rows["slowest stage"].before, rows["slowest stage"].typical) == ("1.23x", "1.08x")
    assert (rows["most attention"].before, rows["most attention"].typical) == ("1.50x", "1.01x")
    hottest = rows["hottest EP rank"]
    assert (hottest.who, hottest.typical) == ("all alike", "1.00x")
    assert rows["most tokens"].before == "", "no balancer of tokens was on"
    rows = {row.balancer: (row.before, row.after) for row in gain_rows(summarize(history))}
    assert rows["layers"] == ("1.23x", "1.08x") and rows["experts"] == ("1.07x", "1.00x")


def test_dealt_micro_batches_are_told_by_the_step_that_they_make(tmp_path):
    """Their own max / mean does not tell it: cheap ones fill and drain the pipeline on purpose."""
    with EventLog(tmp_path) as log:
        of_steps = [(9.0, 8.0), (9.0, 8.0), (1.05, 0.95), (1.07, 0.97), (1.06, 0.96)]
        for iteration, (drawn, dealt) in enumerate(of_steps, start=1):
            steps = {"micro_batch_step_before": drawn, "micro_batch_step_after": dealt}
            log.write(observe(BEFORE.record(iteration)) + [spread(iteration, stage) | steps for stage in (0, 1)])
        log.write([spread(3, 0) | {"micro_batch_step_before": float("nan"), "micro_batch_step_after": 1.0}])
    history = read_history(tmp_path)
    assert history.damage.count == 1
    summary = summarize(history)
    row = gain_rows(summary)[-1]
    assert (row.balancer, row.before, row.after) == ("sequences", "1.06x", "0.96x"), "the first ones warm up"
    assert "equal micro-batches" in row.what
    text = page(history, summary)
    assert "of one with equal micro-batches" in text and "<b>0.96x</b>" in text


def test_a_step_is_compared_around_the_move(history):
    move = summarize(history).move
    assert move is not None and move.iteration == MOVE
    assert move.stage_before.argmax() == 1 and move.stage_before.max() > 1.1 * move.stage_after.max()
    assert move.step_before == pytest.approx(BEFORE.record(MOVE - 3).step_seconds, rel=0.01)
    assert move.step_after == pytest.approx(AFTER.record(15).step_seconds, rel=0.01)
    assert move.step_after < move.step_before


def test_steps_before_an_earlier_move_are_not_those_before_the_last(history):
    history = copy.deepcopy(history)
    history.actions.append(moved(MOVE + 2))
    assert summarize(history).move.step_before == pytest.approx(AFTER.record(MOVE).step_seconds, rel=0.01)
    for iteration in (MOVE, MOVE + 1):  # which a long log leaves out
        del history.stages[iteration]
    assert summarize(history).move is None


def test_balanced_experts_promise_nothing_more(history):
    """An estimate from where experts are at home would promise what replicas have gained already."""
    saved = {estimate.balanced: estimate for estimate in summarize(history).estimates}
    assert not saved["experts"].at_best
    assert "waits for expert-parallel" not in verdict(summarize(history))


def _tell_trials(history, name, ratios, gain, on=True):
    """Add a round of trials as it is in the log."""
    line = event(40, name, "step", imbalance_before=1.0, action="trial")
    low, high = min(ratios), max(ratios)
    figures = {"gain": gain, "gain_low": low, "gain_high": high, "pairs": len(ratios), "on": on}
    history.keep(line | figures | {"pair_iterations": list(range(22, 22 + len(ratios))), "pair_ratios": ratios})


def test_pairs_of_steps_are_drawn_beside_their_gain_and_the_forecast(history):
    assert "Steps without" not in page(history, summarize(history))
    history = copy.deepcopy(history)
    for line in history.actions:
        if line["action"] == "move":
            line |= {"predicted_step_before": 1.1, "predicted_step_after": 1.0}
    ratios = {"experts": [1.1, 1.3, 1.25, 1.2, 1.31, 1.21], "layers": [1.0, 1.1], "together": [1.4]}
    for name, values in ratios.items():
        _tell_trials(history, name, values, float(np.median(values)))
    summary = summarize(history)
    text = page(history, summary)
    picture = text[text.index('id="pairs-figure') :]
    dots = [
        part.count("<use ") for part in re.findall(r"<g clip-path.*?</g>", picture[: picture.index("</svg>")], re.S)
    ]
    assert [number for number in dots if number] == [6, 2, 1]
    (first, *_) = answers(summary)
    assert first.text == (
        "Balancing gained: experts 1.23x (1.10 to 1.31, 6 pairs), layers 1.05x (1.00 to 1.10, 2 pairs); together 1.40x "
        "(1.40 to 1.40, 1 pair). Forecast: layers 1.10x."
    )
    summary.forecast["layers"] = 1.2
    (first, *_) = answers(summary)
    assert "Forecast: layers 1.20x. The forecast of layers was too high: it is of the measured seconds" in first.text


def _tell_calls(history, kind, way, times, calls):
    """Add a line on measured calls as it is in the log."""
    line = event(5, "cluster", "call", imbalance_before=1.0, action="measured")
    history.keep(line | {"kind": kind, "way": way, "flops": 1e8, "calls": calls, "times": times})


def test_the_gain_of_replicas_is_forecast_from_the_seconds_of_a_row(history):
    """Layer 3 is on stage 0: of 500 tokens its busiest rank would have 0.6 times as many more."""
    history = copy.deepcopy(history)
    _tell_trials(history, "experts", [1.1] * 6, 1.1)
    assert summarize(history).forecast == {}, "no call of experts was measured"
    _tell_calls(history, "experts", "forward", 1.0, [[100, 4, 0.1, 1], [300, 4, 0.3, 2]])
    summary = summarize(history)
    assert summary.forecast["experts"] == pytest.approx(1 + 3 * 1e-3 * 500 * 0.6 / summary.step_seconds, rel=1e-3)
    assert (
        "Forecast: experts" in answers(summary)[0].text
        and "The forecast of experts was too" in answers(summary)[0].text
    )


def test_of_a_long_log_the_begin_the_end_and_all_moves_are_read(tmp_path, monkeypatch):
    with EventLog(tmp_path) as log:
        for iteration in range(1, 201):
            record = (BEFORE if iteration < MOVE else AFTER).record(iteration)
            log.write([*observe(record), replicate(iteration, 3)] + [moved(MOVE)] * (iteration == MOVE))
    whole = read_history(tmp_path)
    each = log.path.stat().st_size // 200
    monkeypatch.setattr(of_history, "FIRST_BYTES", 5 * each)
    monkeypatch.setattr(of_history, "LAST_BYTES", 20 * each)
    history = read_history(tmp_path)
    assert not history.damage and 174 * each < history.left_out < 176 * each
    assert len(history.iterations) <= 27 and {*range(1, 5), *range(182, 201)} <= {*history.iterations}
    assert len(history.actions) == len(history.iterations) + 1 and 190 in history.stages
    assert {*history.iterations} == {*history.stages} == {*history.layers}, "an iteration is read whole or not at all"
    assert history.unread.endswith("KiB in the middle of events.jsonl were not read.") and not whole.unread
    summary = summarize(history)
    assert " of the log between them not read" in basis(summary) and "not read" not in basis(summarize(whole))
    layers = [[gain for gain in each.gains if gain.balancer == "layers"] for each in (summary, summarize(whole))]
    assert layers[0] == layers[1] and layers[0][0].before > layers[0][0].after
    assert summary.counted[0] > MOVE and summary.move is not None


def test_what_trials_have_switched_off_is_not_called_on(history):
    history = copy.deepcopy(history)
    _tell_trials(history, "experts", [0.97] * 10, 0.97)
    assert "switched off" not in answers(summarize(history))[0].text
    _tell_trials(history, "experts", [0.96] * 10, 0.96, on=False)
    summary = summarize(history)
    assert "Trials have switched off experts." in answers(summary)[0].text
    summary.estimates[:] = [replace(each, saved=0.5) for each in summary.estimates]
    said = "beside layers and sequences, which are on, and experts, which have been on, and did not pay."
    assert said in answers(summary)[-1].text
    summary.gains[:], summary.actions = [], {}  # long ago, in iterations that were not written
    assert "--balance-experts" not in answers(summary)[-1].text
    again = copy.deepcopy(history)
    for iteration in range(30, 330):  # and a job that goes on without trials
        for line in [*observe(BEFORE.record(iteration)), *[replicate(iteration, 3)] * (iteration >= 300)]:
            again.keep(json.loads(json.dumps(line, default=np.ndarray.tolist)))
    assert "switched off" not in answers(summarize(again))[0].text
    _tell_trials(history, "experts", [1.2] * 10, 1.2)
    assert "switched off" not in answers(summarize(history))[0].text


def test_a_job_that_was_started_again_is_forecast_once(history):
    """Its layers moved again from the first layout, and some of its iterations ran twice."""
    once, again = copy.deepcopy(history), copy.deepcopy(history)
    predicted = {"predicted_step_before": 1.1, "predicted_step_after": 1.0}
    for found, moves in ((once, 1), (again, 2)):
        _tell_calls(found, "experts", "forward", 1.0, [[100, 4, 0.1, 1]])
        for _ in range(moves):
            found.keep(moved(MOVE) | predicted)
    for line in [replicate(iteration, layer) for iteration in range(1, 21) for layer in range(8)]:
        again.keep(line)
    assert predicted_of_moves(once) == predicted_of_moves(again) == pytest.approx(1.1)
    counted = range(1, 21)
    assert predicted_of_replicas(once, counted) == predicted_of_replicas(again, counted) > 1


def test_a_forecast_from_a_balanced_run_begins_with_its_replicas(history):
    (rows,), notes = forecast_recorded(history)
    assert "The run was balanced" in " ".join(notes)
    assert rows[0].experts == pytest.approx(1.0), "no row is without the replicas of the run"


def test_the_last_measured_lines_of_a_long_log_are_read_from_its_end(tmp_path, monkeypatch):
    monkeypatch.setattr(of_history, "_BLOCK", 100)  # lines are longer and shorter
    monkeypatch.setattr(of_history, "MOST_MEASURED", 5)
    lines = [{"action": "other" if at % 3 else "measured", "at": at, "more": "x" * (at % 7 * 30)} for at in range(40)]
    text = "\n".join(map(json.dumps, lines))
    (tmp_path / "events.jsonl").write_text(f'{text}\n\n{{"action": "measured", "at"')  # killed within a line
    assert [line["at"] for line in measured_lines(tmp_path)] == [39, 36, 33, 30][::-1]
    monkeypatch.setattr(of_history, "MOST_MEASURED", 100)
    assert [line["at"] for line in measured_lines(tmp_path)] == [*range(0, 40, 3)]


def test_rates_that_calls_do_not_keep_are_named(history):
    history = copy.deepcopy(history)
    _tell_calls(history, "cudnn", "forward", 1.05, [])
    assert "rates" not in [answer.about for answer in answers(summarize(history))], "within a tenth"
    for times in (1.4, 1.5, 9.0):
        _tell_calls(history, "cudnn", "backward", times, [])
    _tell_calls(history, "experts", "forward", 0.5, [[100, 4, 0.1, 1]])
    (told,) = (answer for answer in answers(summarize(history)) if answer.about == "rates")
    assert "say: attention by cudnn backward 1.50x, experts forward 0.50x." in told.text
    for wrong in ({"times": -1.0}, {"times": float("nan")}, {"calls": [[1, 2, 3]]}, {"calls": [[1, 2, 0, 1]]}):
        line = event(5, "cluster", "call", imbalance_before=1.0, action="measured", kind="experts", way="forward")
        with pytest.raises((TypeError, ValueError)):
            history.keep(line | {"calls": [[100, 4, 0.1, 1]]} | wrong)


def test_page_shows_before_and_after(history):
    text = page(history, summarize(history))
    assert text.count('<div class="gain">') == 4, "three balancers and the step"
    assert re.findall("<dt>(.+)</dt>", text) == ["step", "slow", "gained", "to gain", "flag"]
    assert "--balance-" not in answers(summarize(history))[-1].text, "all of them are on"
    assert text.count('class="bar before"') == text.count('class="bar after"') == 3
    for title in (
        "Stages before and after layers moved", "Attention of ranks in a micro-batch",
        "One iteration on the clock, before layers moved", "One iteration on the clock, after layers moved",
    ):  # fmt: skip
        assert f"<h2>{title}</h2>" in text
    assert "The fullest rank had 1.01x the mean; as Megatron-LM cuts a batch, it would have 1.50x." in text


def test_nothing_of_this_without_a_balancer(tmp_path):
    with EventLog(tmp_path) as log:
        for iteration in range(1, 7):
            log.write(observe(BEFORE.record(iteration)))
    history = read_history(tmp_path)
    summary = summarize(history)
    assert summary.gains == [] and summary.move is None and gain_rows(summary) == []
    assert all(row.before == "" for row in finding_rows(summary))
    text = page(history, summary)
    assert 'class="gain"' not in text and "before" not in text.split("</style>")[1]
    assert "Balancing took" not in verdict(summary)
    screen = io.StringIO()
    print_summary(summary, screen)
    assert "gained" not in screen.getvalue()


def test_a_move_that_was_taken_back_is_called_so(tmp_path):
    with EventLog(tmp_path) as log:
        for iteration in range(1, 21):
            log.write(observe((AFTER if 7 <= iteration < 13 else BEFORE).record(iteration)))
        back = moved(13, "rollback", before="Et*5|tttL", after="Et*4|t*4L")
        log.write([moved(7), back | {"reason": "steps take longer"}])
    history = read_history(tmp_path)
    summary = summarize(history)
    assert [(gain.before, gain.after) for gain in summary.gains] == [(pytest.approx(4 / 3.25),) * 2]
    assert summary.move is not None and summary.move.iteration == 13
    assert "step when layers moved back (iteration 13)" in [row.what for row in gain_rows(summary)]
    text = page(history, summary)
    assert "Stages before and after layers moved back" in text and "steps take longer" in text


def test_a_line_of_an_older_or_broken_run_is_no_reason_to_stop(tmp_path):
    """Lines without what each rank had; and lines whose arrays are none."""
    old = {name: value for name, value in replicate(1, 3).items() if name != "tokens_per_rank"}
    with EventLog(tmp_path) as log:
        log.write(observe(BEFORE.record(1)) + observe(BEFORE.record(2)))
        log.write([old | {"iteration": 2}])
        log.write([replicate(2, 3) | {"tokens_per_rank": broken} for broken in ([-1, 2], "many", [[1], [2]])])
        log.write([spread(2, 0) | {"ordered_after": [1.0]}])
        log.write([spread(2, 0) | {"ordered_after": [], "ordered_before": []}])
    history = read_history(tmp_path)
    assert history.damage.count == 5
    summary = summarize(history)
    assert [gain.balancer for gain in summary.gains] == ["experts"]
    assert summary.share_expert_homes == {} and "1.60x" in page(history, summary)

"""`--cluster auto`: planners get what the job measures, and no number changes when they do."""

import contextlib
import io
import json
import re
from dataclasses import replace
from typing import Any

from balancing.cluster import Cluster
from balancing.report import measured_lines
from tests.experts.test_training import BASE
from tests.support.corpus import heavy_tailed, write_documents
from tests.support.refusals import assert_refused
from tests.support.settings import settings
from tests.support.training import EXACT, MOCK_DATA, MODEL, RankRun, assert_close, join, train, train_rank

EP2 = "--expert-model-parallel-size 2"
OFTEN = settings("report", interval=2)


def _train(argv: list[str]) -> tuple[RankRun, str]:
    """A rank's run, and what it printed."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        run = train_rank(argv, True)
    return run, said.getvalue()


def _kinds(folder: Any) -> set[tuple[str, str]]:
    return {(line["kind"], line["way"]) for line in measured_lines(folder)}


def test_a_report_is_read_once(tmp_path, monkeypatch):
    """It may be of a job that still writes it, and ranks compare what they have read."""
    from megatron.balanced.trainer import config

    read: list[Any] = []
    monkeypatch.setattr(config, "measured_lines", lambda directory: read.append(directory) or [])
    monkeypatch.setattr(config, "measured_cluster", lambda base, lines: (base, "measured"))
    given = config.BalanceConfig(cluster=str(tmp_path))
    assert config.cluster_from_flags(given, 8) is config.cluster_from_flags(given, 8) is not None
    assert read == [str(tmp_path)]


def test_experts_are_planned_by_measured_rates_from_the_middle_of_a_run(pool, tmp_path):
    flags = (
        f"{EP2} --balance-experts {settings('experts', min_gain=0)} --cluster auto --balance-report {tmp_path} {OFTEN}"
    )
    runs = pool.run(2, _train, [*BASE, *flags.split()])
    assert_close(join([run for run, _ in runs]), train(pool, 2, EP2, base=BASE, parameters=True))
    lines = [line for line in runs[0][1].splitlines() if "--cluster auto" in line]
    assert len(lines) == 1 and "from now on: measured experts" in lines[0]
    assert re.search(r" calls; links measured: [\d.,]+ GB/s in a node, [\d,]+ us a message$", lines[0])
    assert "--cluster auto" not in runs[1][1], "one rank says so"
    assert _kinds(tmp_path) == {("experts", "forward")}
    assert all(line["iteration"] > 2 for line in measured_lines(tmp_path)), "the first steps are not measured"


def test_documents_are_planned_by_what_an_earlier_run_measured(pool, tmp_path):
    data = write_documents(tmp_path / "documents", heavy_tailed(400, seed=1))
    base = [*MODEL, *EXACT, *data, *"--dataloader-inter-document-masking --train-iters 8".split()]
    report = tmp_path / "report"
    flags = f"--context-parallel-size 2 --balance-sequences --cluster auto --balance-report {report} {OFTEN}"
    first, again = (pool.run(2, _train, [*base, *flags.split()]) for _ in range(2))
    assert _kinds(report) == {("cpu", "forward"), ("cpu", "backward")}
    assert "> rates: --cluster auto, measured attention by cpu" in again[0][1]
    assert "TFLOP/s forward / backward" in again[0][1]
    assert "> rates: those of CPU cores over gloo, one for attention of any length, not measured here" in first[0][1]
    assert "--cluster auto" not in first[0][1], "loaders plan ahead, so nothing changes in the middle of a run"
    alone = train(pool, 1, base=base, parameters=True)
    for runs in (first, again):
        assert_close(join([run for run, _ in runs]), alone)
    given = f"--context-parallel-size 2 --balance-sequences --cluster {report}"
    assert_close(join([run for run, _ in pool.run(2, _train, [*base, *given.split()])]), alone)


def test_bad_input(pool, tmp_path):
    record = tmp_path / "record"
    record.mkdir()
    (record / "events.jsonl").write_text(json.dumps({"action": "measured", "kind": "fa2", "way": "up"}) + "\n")
    cases = {
        "auto": ("--cluster auto", "--cluster auto", "add --balance-report DIR"),
        "nothing": (f"--cluster {tmp_path}", f"--cluster {tmp_path}", "has not measured enough calls"),
        "wrong": (f"--cluster {record}", "measured calls of fa2/up", "name another report"),
    }
    assert_refused(pool, [*MODEL, *MOCK_DATA], cases)


def test_what_is_measured_and_what_is_not_is_said(monkeypatch):
    from balancing.experts.config import ExpertConfig
    from megatron.balanced.trainer import config

    monkeypatch.setattr(config, "is_cpu", lambda: True)
    assert config.default_machine(on_cpus=True).flops < 1e12, "no GPU is the price of a CPU's plans"
    assert config.rates_line(config.BalanceConfig(), None).startswith("rates: those of CPU cores over gloo, one for")
    monkeypatch.setattr(config, "is_cpu", lambda: False)
    given = replace(config.BalanceConfig(), cluster="h100-8x400g")
    h100 = Cluster.preset("h100-8x400g")
    assert config.rates_line(given, h100).startswith("rates: --cluster h100-8x400g, measured on one H100 80GB HBM3")
    h200 = config.rates_line(replace(config.BalanceConfig(), experts=ExpertConfig(enabled=True)), None)
    assert h200.startswith("rates: those of a h200-8x400g, not measured: ")
    assert h200.endswith("; transfers of replicas have no price; --cluster auto takes what this job measures")

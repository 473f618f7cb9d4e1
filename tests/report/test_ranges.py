"""With a report, profilers show by name what balancers do."""

from pathlib import Path

import torch

from balancing import ranges
from tests.gpu.training import EXPERTS, PP2, Orders, base, pretrain_rank
from tests.support.corpus import heavy_tailed, write_documents
from tests.support.settings import settings

CP2 = "--context-parallel-size 2 --dataloader-inter-document-masking --eod-mask-loss --balance-sequences"
EXPECTED = {
    "balance: plan of sequences",
    "balance: transfer of keys and values",
    "balance: remap of tokens",
    "balance: transfer of replicas",
    "balance: move of layers",
}


def test_a_function_is_named_where_it_was_asked_for(monkeypatch):
    pushed: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", lambda msg: pushed.append(msg))
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: pushed.append("end"))
    twice = ranges.named("work")(lambda x: 2 * x)
    assert twice(2) == 4 and pushed == []
    ranges.name_ranges()
    try:
        assert twice(2) == 4 and pushed == ["balance: work", "end"]
    finally:
        ranges.name_ranges(False)


def _profiled(argv: list[str]) -> set[str]:
    """The ranges of balancers in one rank's profile of a run."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        pretrain_rank(argv, Orders({2: ((1,), (3,))}))
    return {event.name for event in profile.events() if event.name.startswith("balance: ")}


def test_a_profile_of_a_run_has_the_names(pool, tmp_path):
    data = " ".join(write_documents(tmp_path / "documents", heavy_tailed(400, seed=1)))
    zones = settings("sequences", planner="zones")  # whose ranks have other tokens outside of attention
    flags = f"{EXPERTS} {PP2} {CP2} {zones} --balance-experts {settings('experts', min_gain=0)} --balance-layers"
    argv = [*base("cpu", data=data), *flags.split()]
    report = ["--balance-report", str(tmp_path / "report")]
    with_report = pool.run(4, _profiled, argv + report)
    assert set().union(*with_report) >= EXPECTED
    line = next(line for line in pool.output[0].splitlines() if line.startswith("> kernels: "))
    kernel = "torch's flash attention for CPUs, merged by operations of torch"
    assert line == f"> kernels: attention: {kernel}; experts: one after the other"
    text = Path(tmp_path / "report/events.jsonl").read_text()
    assert '"slot_bytes":' in text and '"slot_bytes":0' not in text
    assert pool.run(4, _profiled, argv) == [set()] * 4, "without a report nothing is named"

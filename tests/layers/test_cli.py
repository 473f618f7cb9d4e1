"""Layout strings, re-packing, and `python -m balancing.layers` on a recorded run."""

import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from balancing.layers import (
    LayerMemory,
    LayerSeconds,
    Running,
    StagePlan,
    choose_repack,
    plan_stages,
    repack_options,
    stage_memory,
)
from balancing.layers.recorded import estimate_memory
from balancing.pipeline import MEGATRON_DEFAULTS, Schedule, from_layout, to_layout
from balancing.report import EventLog, observe, read_history, summarize
from balancing.report.findings import finding_rows
from balancing_tools.layers import main
from balancing_tools.recorded_run import read_run
from tests.support.made_up_run import Job, write_run

# ---- layout strings


@given(st.integers(1, 5), st.integers(1, 3), st.data())
@settings(max_examples=60)
def test_megatron_reads_what_we_write_and_we_read_it_back(stages, virtual, data):
    from megatron.core.transformer.enums import LayerType
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

    sizes = data.draw(st.lists(st.integers(0, 12), min_size=stages * virtual, max_size=stages * virtual))
    if not sum(sizes):
        sizes[0] = 1
    if data.draw(st.booleans()):
        sizes = [sizes[0]] * len(sizes) if sizes[0] else sizes
    plan = StagePlan.from_bounds(np.concatenate([[0], np.cumsum(sizes)]).tolist(), stages)
    text = to_layout(replace(plan, tail_layers=1 if stages > 1 else 0))
    theirs = PipelineParallelLayerLayout(text, stages)
    theirs.validate_layer_layout(plan.layers, 1 if stages > 1 else 0)
    for stage in range(stages):
        for chunk in range(virtual):
            assert theirs.layout[stage][chunk].count(LayerType.decoder) == plan.counts[stage][chunk]
    read = from_layout(text, stages, layers=plan.layers)
    assert read.chunks == plan.chunks and to_layout(read) == text


def test_short_strings():
    assert to_layout(StagePlan.from_counts(((3,),) + ((2,),) * 6 + ((1,),))) == "Ettt|(tt|)*6tL"
    assert to_layout(StagePlan.from_counts(((5,), (4,)))) == "Et*5|t*4L"
    alone = from_layout("Et*3|(tt|)*29,m|L", 32)
    assert alone.counts == ((3,),) + ((2,),) * 29 + ((0,), (0,))
    assert (alone.tail_layers, alone.tail_chunk, alone.behind) == (1, 30, 1)
    assert from_layout("E|t|tt|L", 2).chunks == (((), (1, 2)), ((0,), ()))


@pytest.mark.parametrize(
    "text, stages, message",
    [
        ("Ettt|ttL", 2, "has 5 layers, the model 6: it drops 1"),
        ("Ettt|t*4L", 2, "has 7 layers, the model 6: it adds 1"),
        ("Ett|tt|ttL", 2, "has 3 virtual stages, which 2 pipeline stages do not divide"),
        ("ttt|tttL", 2, "must have E, the embedding, once and at its very beginning"),
        ("Ettt|ttt", 2, "must have L, the loss, once and at its very end"),
        ("EtttL|tttL", 2, "must have L"),
        ("Ettt|txtL", 2, "has 'x'; only"),
        ("Ettt|((tt)*2)*2L", 2, r"has '\('; only"),
        ("Etm|tttttL", 2, "has a t after an m"),
        ("E(t)*99999999|L", 2, "repeats something 99999999 times"),
    ],
)
def test_bad_layouts(text, stages, message):
    with pytest.raises(ValueError, match=message):
        from_layout(text, stages, layers=6)


# ---- fewer stages


def early_exit(layers=32):
    forward = np.where(np.arange(layers) < layers // 2, 1.0, 0.2)
    return LayerSeconds(forward, 2 * forward)


def test_repack_options_are_simulated_and_fit():
    cost, memory = early_exit(), LayerMemory(np.full(32, 1.0), 0.05)
    now = plan_stages(cost.total, 8, method="uniform")
    sizes = repack_options(Running(cost, now, 32, 2, 4), memory=memory, memory_limit=10)
    assert [each.stages for each in sizes] == [8, 7, 6, 5, 4, 3, 2, 1]
    before = cost.simulate(now, 32).step_time
    for each in sizes:
        if each.stages <= 3:
            assert each.plan is None and "memory_limit 10 bytes" in each.reason
            continue
        assert each.plan is not None and each.step_seconds == cost.simulate(each.plan, 32).step_time
        assert each.throughput == pytest.approx(before / each.step_seconds)
        assert each.gpu_time == pytest.approx(each.step_seconds * each.stages / (before * 8))
        assert each.freed_ranks == 2 * (8 - each.stages) and each.freed_nodes == (8 - each.stages) // 2
    assert sizes[0].throughput > 1.25, "the same stages, but cut anew"
    assert 0.55 < sizes[4].throughput < 1 and sizes[4].gpu_time < 0.9, "half of the stages, more than half as fast"


def test_choice_keeps_the_floor_and_frees_whole_nodes():
    sizes = repack_options(Running(early_exit(), plan_stages(np.ones(32), 8), 32, 2, 4))
    chosen = choose_repack(sizes, 0.9)
    assert chosen is not None and chosen.stages == 5 and chosen.throughput >= 0.9 and chosen.freed_nodes == 1
    fewest = [each for each in sizes if each.freed_nodes and each.throughput >= 0.9]
    assert chosen.gpu_time == min(each.gpu_time for each in fewest)
    chosen = choose_repack(sizes, 1.1)
    assert chosen is not None and chosen.stages == 7, "no whole node can go, two ranks can"
    assert choose_repack(sizes, 99.0) is None
    with pytest.raises(ValueError, match="throughput floor is 0"):
        choose_repack(sizes, 0)
    with pytest.raises(ValueError, match="min_stages=9 must lie between 1 and the 8 stages"):
        repack_options(Running(early_exit(), plan_stages(np.ones(32), 8), 32), min_stages=9)


# ---- the command


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    job = Job(head=0.03, embedding=0.001, slow={5: 2.5}, noise=0.0)
    return write_run(tmp_path_factory.mktemp("run"), job, 6)


def command(capsys, *arguments):
    code = main(["--from-report", *map(str, arguments)])
    out, err = capsys.readouterr()
    return code, out, err


def test_reads_what_was_planted(recorded):
    run = read_run(recorded)
    expected = 0.03 * np.where(np.arange(8) == 5, 2.5, 1.0)
    assert run.cost.total == pytest.approx(expected, rel=0.05) and run.plan.counts == ((2,),) * 4
    assert sum(run.cost.head) == pytest.approx(0.09, rel=0.01) and sum(run.cost.embedding) == pytest.approx(0.003)
    assert (run.micro_batches, run.ranks_per_stage, run.ranks_per_node) == (8, 2, 4)
    # The recorded run waits for its slower replica, so the simulation of means is a little below it.
    assert run.cost.simulate(run.plan, 8).step_time == pytest.approx(run.step_seconds - 0.02, rel=0.03)


def test_prints_the_layout_and_its_gain(recorded, capsys):
    code, out, err = command(capsys, recorded)
    assert (code, err) == (0, "")
    text = re.search(r'--pipeline-model-parallel-layout "(.+)"', out)[1]
    run, plan = read_run(recorded), from_layout(text, 4, layers=8)
    loads = run.cost.stage_loads(plan)
    assert loads.max() < 0.85 * run.cost.stage_loads(run.plan).max()
    gain = run.cost.simulate(run.plan, 8).step_time / run.cost.simulate(plan, 8).step_time - 1
    assert gain > 0.1 and f"{gain:+.1%} throughput" in out


def test_says_how_many_chunks_a_stage_are_quicker(recorded, capsys):
    _, out, _ = command(capsys, recorded)
    said = re.search(
        r"The pipeline by chunks a stage, messages not counted: 1: (\S+) ms, 2: (\S+) ms\. --virtual 2", out
    )
    assert said, out  # eight layers are too few for three
    _, out, _ = command(capsys, recorded, "--virtual", 2)
    run = read_run(recorded)
    plan = from_layout(re.search(r'--pipeline-model-parallel-layout "(.+)"', out)[1], 4, layers=8)
    assert plan.virtual == 2 and "by chunks a stage" not in out
    assert run.cost.simulate(plan, 8).step_time * 1e3 == pytest.approx(float(said[2]), rel=1e-3)
    assert float(said[2]) < 0.99 * float(said[1])


def test_weighs_a_given_layout_and_other_sizes(recorded, capsys):
    assert "+0.0% throughput" in command(capsys, recorded, "--layout", "Ett|tt|tt|ttL")[1]
    code, out, _ = command(capsys, recorded, "--stages", 2, "--virtual", 2, "--micro-batches", 4)
    assert code == 0 and "8 layers, 2 stages of 2 chunks, 4 micro-batches" in out
    code, out, _ = command(capsys, recorded, "--repack-throughput-floor", 0.7)
    assert code == 0 and "ranks freed" in out and "2 stages, which free 4 ranks and 1 whole nodes" in out


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--layout", "Ett|tt|tt|tL"], "has 7 layers, the model 8: it drops 1"),
        (["--stages", "0"], "--stages: 0 must be a whole number from 1 to 4,096"),
        (["--repack-throughput-floor", "0.9", "--repack-min-stages", "4"], "there is nothing to release"),
        (["--repack-throughput-floor", "nan"], "nan must be a number above 0, at most 1"),
        (["--stages", "1000000000"], "must be a whole number from 1 to 4,096"),
        (["--stages", "12"], "12 stages of 1 chunks are more than the 8 layers"),
        (["--micro-batches", "1000000000"], "from 1 to 100,000"),
        (["--virtual", "100000000"], "from 1 to 4,096"),
        (["--mtp-layers", "1000000000"], "from 0 to 64"),
        (["--memory-limit", "nan"], "nan must be a number above 0"),
        (["--repack-min-stages", "2"], "--repack-min-stages 2 has no effect without --repack"),
        (["--layout", "Ett|tt|tt|ttL", "--virtual", "2"], "--virtual 2 has no effect on a given --layout"),
        (["--layout", "Ett|tt|tt|ttL", "--memory-limit", "8"], "--memory-limit 8.0 has no effect on a given --layout"),
        (["--repack", "--repack-min-stages", "5"], "min_stages=5"),
        (["--memory-limit", "1"], "no plan keeps to memory_limit 1,000,000,000 bytes on 4 stages"),
        (["--stages", "2", "--virtual", "2", "--micro-batches", "3"], "last group of 1"),
    ],
)
def test_bad_input_ends_in_one_line(recorded, capsys, arguments, message):
    code, out, err = command(capsys, recorded, *arguments)
    assert code == 2 and message in err and err.count("\n") == 1
    assert not out or "there is nothing to release" in err, "an error of the flags came after a table"


def test_memory_is_estimated_on_the_safe_side(tmp_path, capsys):
    """Stages hold 2 layers of 3 GB and, from the first to the last, 4 to 1 micro-batches of 1 GB a layer."""
    memory = {rank: 2 * 3 * 10**9 + (4 - rank // 2) * 2 * 10**9 + (rank // 2 == 3) * 5 * 10**9 for rank in range(8)}
    run = read_run(write_run(tmp_path, Job(memory=memory, noise=0.0), 4))
    estimate = estimate_memory(run)
    assert (stage_memory(run.plan, estimate, 8) >= run.memory * (1 - 1e-9)).all()
    assert stage_memory(run.plan, estimate, 8) == pytest.approx(run.memory, rel=0.35)
    code, out, _ = command(capsys, tmp_path, "--memory-limit", 19, "--repack")
    assert code == 0 and "no plan keeps to memory_limit 19,000,000,000 bytes on 1 stages" in " ".join(out.split())
    with pytest.raises(ValueError, match="no memory of its ranks"):
        estimate_memory(replace(run, memory=np.zeros(0)))


# ---- several chunks a stage


def test_a_recorded_schedule_is_that_of_the_plans(tmp_path, capsys):
    plan, schedule = StagePlan.from_counts(((2, 2), (2, 2))), Schedule(group=6, in_parts=True)
    peak = stage_memory(plan, LayerMemory(np.full(8, 1e9), 1e9), 12, schedule)
    chunked = Job(
        stages=2, layers=8, micro_batches=12, experts=0, moved={n: n // 2 % 2 for n in range(8)},
        memory={rank: int(peak[rank // 2]) for rank in range(4)},
    )  # fmt: skip

    def write(directory, **schedule):
        with EventLog(directory) as log:
            for iteration in range(1, 9):
                record = replace(chunked.record(iteration), **schedule)
                for rank in record.ranks:
                    rank.spans = [
                        span._replace(chunk=span.layer // 4 if span.layer != "" else 0) for span in rank.spans
                    ]
                log.write(observe(record))
        return directory

    run = read_run(write(tmp_path / "groups", microbatch_group_size=6, overlap_moe_expert_parallel_comm=True))
    assert run.plan.counts == plan.counts and run.schedule == schedule
    plain = read_run(write(tmp_path / "plain"))
    assert plain.plan == run.plan and plain.schedule == MEGATRON_DEFAULTS
    np.testing.assert_allclose(stage_memory(plan, estimate_memory(run), 12, schedule), peak, rtol=1e-3)
    assert estimate_memory(run).activation_of_layers[0] == pytest.approx(1e9, rel=1e-2)

    steps = []
    for directory in ("groups", "plain"):
        assert main(["--from-report", str(tmp_path / directory), "--repack"]) == 0
        text = capsys.readouterr().out
        steps.append(re.search(r"by simulation, (\S+ ms) as recorded", text)[1])
    assert steps == [
        f"{each.cost.simulate(each.plan, 12, schedule=each.schedule).step_time * 1e3:.4g} ms" for each in (run, plain)
    ]
    assert main(["--from-report", str(tmp_path / "groups"), "--micro-batches", "4"]) == 2
    assert "groups of 6" in capsys.readouterr().err

    log = tmp_path / "groups" / "events.jsonl"
    log.write_text(log.read_text().replace('"microbatch_group_size":6', '"microbatch_group_size":0'))
    with pytest.raises(ValueError):
        read_run(tmp_path / "groups")


# ---- hybrid models


def test_layers_of_a_pattern_are_told_by_name(tmp_path, capsys):
    """The layout found is a pattern with segments, which a run begins with."""
    kinds = ("Mamba", "MLP", "attention", "Mamba", "MLP", "attention", "MoE", "Mamba")
    slow = {0: 0.5, 3: 0.5, 7: 0.5, 6: 4.0}
    with EventLog(tmp_path) as log:
        for iteration in range(1, 9):
            record = Job(stages=2, experts=0, slow=slow, head=0.02).record(iteration)
            log.write(observe(replace(record, kinds=kinds)))
    run = read_run(tmp_path)
    assert run.pattern is not None and run.pattern.symbols == "M-*M-*EM"
    code, out, _ = command(capsys, tmp_path)
    assert code == 0 and "as recorded (M-*M|-*EM)" in out
    assert '--hybrid-layer-pattern "M-*M-*|EM"' in out and "--pipeline-model-parallel-layout" not in out
    rows = {line.split()[0]: line.split()[1:] for line in out.splitlines() if line.strip().startswith(kinds)}
    assert rows["Mamba"][0] == "3" and rows["MoE"][0] == "1" and rows["MLP"][0] == rows["attention"][0] == "2"
    assert float(rows["MoE"][1]) == pytest.approx(8 * float(rows["Mamba"][1]), rel=0.05)
    code, out, _ = command(capsys, tmp_path, "--layout", "M-*M-|*EM")
    assert code == 0 and '--hybrid-layer-pattern "M-*M-|*EM"' in out
    for layout, says in (("M-*M-|*EE", "other layers than the run, M-*M-*EM"), ("M-*|M-*|EM", "3 segments")):
        code, _, err = command(capsys, tmp_path, "--layout", layout)
        assert code == 2 and says in err and err.count("\n") == 1
    findings = {(row.what, row.who) for row in finding_rows(summarize(read_history(tmp_path)))}
    assert {("Mamba layers", "3 layers"), ("MoE layers", "1 layer")} <= findings


def test_kinds_that_do_not_fit_are_damage(tmp_path):
    with EventLog(tmp_path) as log:
        for iteration in range(1, 5):
            log.write(observe(replace(Job(stages=2, experts=0).record(iteration), kinds=("MLP",) * 8)))
    path = tmp_path / "events.jsonl"
    path.write_text(path.read_text().replace('"kinds":["MLP",', '"kinds":['))
    with pytest.raises(ValueError, match="damaged"):
        read_run(tmp_path)

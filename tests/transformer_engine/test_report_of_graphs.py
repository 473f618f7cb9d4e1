"""The report of runs with CUDA graphs: what captured code counts, and what is said of what is not seen.

Megatron-LM's own code captures and replays. The stand-ins of graphs replay operators without any Python, so a count
that a hook made would stop at the captured iteration.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from balancing.report import read_history, summarize
from balancing.report.findings import answers, basis
from balancing_tools.report.page import page
from tests.support.settings import settings
from tests.support.training import RankRun, join, train_rank
from tests.support.transformer_engine.model import EXPERTS, assert_close
from tests.transformer_engine import test_captured_iterations, test_graphs


def _observed(folder: Path, unit: str, balancer: str = "layers") -> dict[int, dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    of = [line for line in lines if (line["balancer"], line["unit"], line["action"]) == (balancer, unit, "observe")]
    return {line["iteration"]: line for line in of}


def _loads(folder: Path) -> dict[tuple[int, int], list[int]]:
    lines = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    of = [line for line in lines if (line["balancer"], line["unit"]) == ("experts", "rank")]
    return {(line["iteration"], line["layer"]): line["tokens_per_expert"] for line in of}


def _train_eagerly(argv: list[str]) -> RankRun:
    test_graphs._use_torchs_adam()
    return train_rank(argv, True)


@pytest.mark.parametrize("graphs", ["attn", "attn moe_router"])
def test_graphs_of_layers_are_counted_and_timed(engine, tmp_path, graphs):
    argv = [*test_graphs.BASE, "--train-iters", "5"]
    reference = join(engine.run(2, _train_eagerly, argv))
    _report(engine, tmp_path / "eager", argv)
    given = [*argv, *f"{test_graphs.GRAPHS} {graphs} --balance-report {tmp_path / 'graphs'}".split()]
    results = engine.run(2, test_graphs._train_on_graphs, given)
    for _, found, files in results:
        assert found and all(replays == 4 * 4 for _, replays in found), found
        counted = any(file.endswith("/observe/captured.py") for file in files)
        assert counted == ("moe_router" in graphs), "the graph holds the count of its router, and no hook"
        assert not any(file.endswith("/observe/timing_hooks.py") for file in files) or counted
    assert_close(join([run for run, *_ in results]), reference, 1e-12, 1e-12)
    loads = _loads(tmp_path / "graphs")
    assert loads == _loads(tmp_path / "eager") and len(loads) == 2 * 5
    assert len({tuple(tokens) for tokens in loads.values()}) > 5, "of each iteration, not of the captured one"
    stages, layers = (_observed(tmp_path / "graphs", unit) for unit in ("stage", "layer"))
    assert [stages[i].get("graphs") for i in range(1, 6)] == [None, *["layers"] * 4]
    for i in range(1, 6):
        assert layers[i]["layers"] == ["embedding", 0, 1, "head"] and min(layers[i]["backward_s"]) > 0
        assert min(stages[i]["busy_s"]) > 0 and stages[i]["micro_batches"] == 4
    summary = summarize(read_history(tmp_path / "graphs"))
    assert summary.graphs == "layers" and summary.counted == [3, 4, 5]


def test_trials_leave_experts_out_of_graphs_of_layers(engine, tmp_path):
    argv = [*test_graphs.BASE, "--train-iters", "50"]
    reference = join(engine.run(2, _train_eagerly, argv))
    trials = f"{settings('experts', min_gain=0)} {settings('trials', share=1.0)}"
    tried = f"--balance-experts {trials} --balance-report {tmp_path}"
    graphs = f"{test_graphs.GRAPHS} attn moe_router {tried}"
    results = engine.run(2, test_graphs._train_on_graphs, [*argv, *graphs.split()])
    for _, found, _ in results:
        assert found and all(replays == 4 * 49 for _, replays in found), found
    assert_close(join([run for run, *_ in results]), reference, 1e-12, 1e-12)
    history = read_history(tmp_path)
    assert history.by_the_clock["experts"].pairs >= 4 and summarize(history).graphs == "layers"


def test_counts_follow_layers_that_move(model_of, tmp_path):
    model = model_of(EXPERTS)
    flags = "--pipeline-model-parallel-size 2 --moe-grouped-gemm --train-iters 5"
    eager = model.argv(f"{flags} --balance-report {tmp_path / 'eager'}")
    model.pool.run(2, train_rank, eager, True)
    graphs = f"{test_graphs.GRAPHS} attn moe_router --balance-layers --balance-report {tmp_path / 'graphs'}"
    model.pool.run(2, test_graphs._move_on_graphs, model.argv(f"{flags} {graphs}"), {2: ((1,), (3,)), 3: ((3,), (1,))})
    loads = _loads(tmp_path / "graphs")
    assert loads == _loads(tmp_path / "eager") and len(loads) == 4 * 5


def _train_on_local_graphs(argv: list[str]) -> tuple[RankRun, list[int]]:
    """Train. Returns the run, and the replays of each graph."""
    from tests.support.stand_ins import captured_iterations, cuda_graphs

    captured_iterations.install()
    cuda_graphs.install_local()
    run = train_rank(argv, True)
    return run, [graph.replays for graph in captured_iterations.captured]


LOCAL = "--cuda-graph-impl local --te-rng-tracker --cuda-graph-warmup-steps 1 --train-iters 4 --global-batch-size 4"


def test_graphs_that_megatron_captures_are_counted_and_timed(model_of, tmp_path):
    """Whole layers, with their experts: tokens are counted in the graph, also where it is run to be captured."""
    model = model_of(test_captured_iterations.MODEL)
    flags = f"{test_captured_iterations.LAYOUT} --moe-expert-rank-capacity-factor 2.0 {LOCAL}"
    eager = f"{flags.replace('graph-impl local', 'graph-impl none')} --balance-report {tmp_path / 'eager'}"
    reference = join([run for run, _ in model.pool.run(2, test_captured_iterations._train, model.argv(eager))])
    argv = model.argv(f"{flags} --balance-report {tmp_path / 'graphs'}")
    results = model.pool.run(2, _train_on_local_graphs, argv)
    for _, replays in results:
        assert replays == [3 * 2] * (2 * 4), "two of each layer, captured after the first iteration"
    assert_close(join([run for run, _ in results]), reference, 1e-5, 1e-4)
    loads = _loads(tmp_path / "graphs")
    assert loads == _loads(tmp_path / "eager") and len({tuple(tokens) for tokens in loads.values()}) > 8
    stages, layers = (_observed(tmp_path / "graphs", unit) for unit in ("stage", "layer"))
    assert [stages[i].get("graphs") for i in range(1, 5)] == [None, *["layers"] * 3]
    for i in range(1, 5):
        assert layers[i]["layers"] == ["embedding", 0, 1, 2, 3, "head"] and min(layers[i]["backward_s"]) > 0


def _report(engine: Any, folder: Path, argv: list[str], ranks: int = 2) -> list[RankRun]:
    return engine.run(ranks, _train_eagerly, [*argv, "--balance-report", str(folder)])


PLAIN, BALANCED = "", test_captured_iterations.BALANCED
ITERATIONS = (
    "--cuda-graph-impl full_iteration --no-check-for-nan-in-loss-and-grad --train-iters 8 --global-batch-size 4"
)


# The first plan, after the first iteration, is captured after three more iterations without a graph.
@pytest.mark.parametrize("balanced, warm_up", [(PLAIN, 3), (BALANCED, 4)], ids=["plain", "experts"])
def test_a_graph_of_iterations_is_counted_and_says_what_it_hides(model_of, tmp_path, balanced, warm_up):
    model = model_of(test_captured_iterations.MODEL)
    flags = f"{test_captured_iterations.LAYOUT} --moe-expert-rank-capacity-factor 2.0 {balanced} {ITERATIONS}"
    of = f"{flags} --cuda-graph-warmup-steps 3"
    results = model.pool.run(2, test_captured_iterations._train, model.argv(f"{of} --balance-report {tmp_path / 'on'}"))
    for _, seen in results:
        assert [replays for _, replays in seen["graphs"]] == [8 - warm_up], seen
    without = join([run for run, _ in model.pool.run(2, test_captured_iterations._train, model.argv(of))])
    assert_close(join([run for run, _ in results]), without, 0, 0)

    eager = f"{flags.replace('full_iteration', 'none')} --balance-report {tmp_path / 'eager'}"
    model.pool.run(2, test_captured_iterations._train, model.argv(eager))
    loads = _loads(tmp_path / "on")
    assert loads == _loads(tmp_path / "eager") and len({tuple(tokens) for tokens in loads.values()}) > 8
    documents = [_observed(tmp_path / of, "rank", "sequences") for of in ("on", "eager")]
    for name in ("tokens", "attention_area", "longest_sequence"):
        assert [line[name] for line in documents[0].values()] == [line[name] for line in documents[1].values()]
    stages, steps, layers = (_observed(tmp_path / "on", unit) for unit in ("stage", "step", "layer"))
    assert [*stages] == [*layers] == [*range(1, warm_up + 1)] and [*steps] == [*range(warm_up + 1, 9)]
    assert all(0 < seconds < line["step_s"] for line in steps.values() for seconds in line["graph_s"])

    history = read_history(tmp_path / "on")
    summary = summarize(history)
    assert (summary.timed, summary.counted) == ([*range(3, warm_up + 1)], [*range(warm_up + 3, 9)])
    timed = "iteration 3" if warm_up == 3 else "2 iterations (3 to 4)"
    said = f"not seen in graphs, but of {timed} outside of them"
    assert said in basis(summary) and said in answers(summary)[0].text and said in page(history, summary)


def test_a_graph_from_the_first_iteration_on_hides_times(model_of, tmp_path):
    model = model_of(test_captured_iterations.MODEL)
    flags = f"{test_captured_iterations.LAYOUT} --moe-expert-rank-capacity-factor 2.0 {ITERATIONS}"
    argv = model.argv(f"{flags} --cuda-graph-warmup-steps 0 --balance-report {tmp_path}")
    model.pool.run(2, test_captured_iterations._train, argv)
    assert not _observed(tmp_path, "stage") and not _observed(tmp_path, "layer") and len(_loads(tmp_path)) == 4 * 8
    history = read_history(tmp_path)
    summary = summarize(history)
    assert summary.step_seconds is None and summary.expert is not None and summary.tokens is not None
    assert "not seen in graphs, and no iteration ran outside" in answers(summary)[0].text
    assert page(history, summary).count("not seen in graphs") >= 4

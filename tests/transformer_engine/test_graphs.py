"""CUDA graphs of attention and routers beside replicas of experts.

Megatron-LM's and Transformer Engine's own code captures and replays; `tests.support.stand_ins.cuda_graphs` is in the
place of the graph itself. What it replays cannot see what Python decided since.
"""

import inspect
from typing import Any

import pytest

from tests.experts.test_fusion import _train_fused, accumulate_fused
from tests.support.moving import moving_rank
from tests.support.sampled import sampled
from tests.support.settings import settings
from tests.support.training import EXACT, MOCK_DATA, MODEL, MOE, RankRun, join, train, train_rank
from tests.support.transformer_engine.model import EXPERTS, assert_close

BASE = [
    *MODEL,
    *MOCK_DATA,
    *EXACT,
    *MOE,
    *"--transformer-impl local --no-rope-fusion --moe-aux-loss-coeff 1e-2 --moe-token-dispatcher-type alltoall".split(),
    *"--init-method-std 0.1 --num-layers 2 --expert-model-parallel-size 2 --global-batch-size 8".split(),
]
GRAPHS = "--cuda-graph-impl transformer_engine --cuda-graph-warmup-steps 1 --cuda-graph-modules"
ROUTED = f"{GRAPHS} attn moe_router moe_preprocess"
PARTS = "--overlap-moe-expert-parallel-comm"
GRADIENTS = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 2000"
INTERLEAVED = "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1"
# ranks, layout, graphs
CASES = {
    "attention": (2, "", f"{GRAPHS} attn"),
    "attention and routers": (2, "--moe-shared-expert-intermediate-size 32", ROUTED),
    "attention and routers, in parts": (2, "", f"{ROUTED} {PARTS}"),
    "both overlaps": (4, GRADIENTS, f"{ROUTED} {PARTS}"),
}
DELAYED = f"{ROUTED} {PARTS} --delay-wgrad-compute --moe-token-dispatcher-type alltoall --moe-grouped-gemm"
# ranks, layout
DELAYED_CASES = {"EP 2": (2, ""), "interleaved": (4, f"{INTERLEAVED} {GRADIENTS}")}


def _use_torchs_adam() -> None:
    """Transformer Engine's has no float64."""
    import torch
    from megatron.core import optimizer

    optimizer.Adam, optimizer.USING_PYTORCH_OPTIMIZER = torch.optim.AdamW, True


def _train_plain(argv: list[str]) -> RankRun:
    _use_torchs_adam()
    return train_rank(argv, True)


def _train_on_graphs(argv: list[str]) -> tuple[RankRun, list[tuple[int, int]], set[str]]:
    """Train. Returns the run; of each graph, how many operators it has and how often it was replayed; and the files of
    the Python that was captured."""
    from tests.support.stand_ins import cuda_graphs

    cuda_graphs.install()
    if "--fp64" in argv:
        _use_torchs_adam()
    run = _train_fused(argv)[0] if "--delay-wgrad-compute" in argv else train_rank(argv, True)
    graphs = [(graph.captured, graph.replays) for graph in cuda_graphs.captured]
    return run, graphs, {file for graph in cuda_graphs.captured for file in graph.files}


def _assert_replayed(results: list[Any], replays: int) -> None:
    for _, graphs, files in results:
        assert graphs and all(captured > 5 and replayed == replays for captured, replayed in graphs), graphs
        ours = {file for file in files if "/balancing/" in file or "/megatron/balanced/" in file}
        assert all("/megatron/balanced/cpu/" in file for file in ours), ours


@pytest.mark.parametrize("case", sampled(CASES, "attention and routers, in parts"))
def test_replicas_beside_graphs_change_no_number(engine, case):
    ranks, layout, graphs = CASES[case]
    argv = [*BASE, *layout.split()]
    reference = join(engine.run(ranks, _train_plain, argv))
    results = engine.run(
        ranks, _train_on_graphs, [*argv, *f"{graphs} --balance-experts {settings('experts', min_gain=0)}".split()]
    )
    # One graph of each layer serves all micro-batches, unless two are in flight.
    _assert_replayed(results, 3 * (1 if PARTS in graphs else 4))
    assert_close(join([run for run, *_ in results]), reference, 1e-12, 1e-12)


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", DELAYED_CASES)
def test_replicas_beside_graphs_of_delayed_gradients(model_of, case):
    """Delayed weight gradients of attention are graphs of their own, those of experts are not."""
    ranks, layout = DELAYED_CASES[case]
    model = model_of(f"{EXPERTS} --global-batch-size 8")
    flags = f"--expert-model-parallel-size 2 {layout} {DELAYED} --balance-experts {settings('experts', min_gain=0)}"
    results = model.pool.run(ranks, _train_on_graphs, model.argv(flags))
    _assert_replayed(results, 3)
    layers = 2 if layout else 4
    assert all(len(graphs) == layers * 4 * 3 for _, graphs, _ in results), "forward, backward, weight gradients"
    assert_close(join([run for run, *_ in results]), model.alone("--moe-grouped-gemm"), 1e-5, 1e-4)


def _move_on_graphs(argv: list[str], plans: Any) -> tuple[RankRun, list[tuple[int, int]], int]:
    """Train with layers that move. Returns the run, the graphs as `_train_on_graphs` does, and the measured layers'
    forward passes of the last step."""
    from megatron.balanced.observe.observer import Observer
    from tests.support.stand_ins import cuda_graphs

    cuda_graphs.install()
    measured: list[Any] = []
    record = Observer._record

    def recorded(self: Any, step: Any) -> Any:
        measured[:] = [span for span in step.spans if span[0] == "forward" and isinstance(span[1], int)]
        return record(self, step)

    Observer._record = recorded
    if "--delay-wgrad-compute" in argv:
        accumulate_fused()
    run, _ = moving_rank(argv, plans)
    return run, [(graph.captured, graph.replays) for graph in cuda_graphs.captured], len(measured)


# model, ranks, flags, graphs
MOVED_CASES = {
    "PP 2": ("", 2, "", "attn mlp"),
    "experts, both overlaps": (
        EXPERTS,
        4,
        f"--expert-model-parallel-size 2 --moe-grouped-gemm {GRADIENTS}",
        "attn moe_router",
    ),
}


@pytest.mark.parametrize("case", sampled(MOVED_CASES, "PP 2"))
def test_graphs_of_layers_that_moved_are_captured_anew(model_of, case):
    model, ranks, flags, graphs = MOVED_CASES[case]
    model = model_of(model)
    flags = f"--pipeline-model-parallel-size 2 {flags}"
    argv = model.argv(f"{flags} {GRAPHS} {graphs} --train-iters 5 --balance-layers")
    results = model.pool.run(ranks, _move_on_graphs, argv, {2: ((1,), (3,)), 3: ((3,), (1,))})
    for rank, (_, found, measured) in enumerate(results):
        layers = [2, 1, 3] if rank < ranks // 2 else [2, 3, 1]
        batches = len(found) // (2 * sum(layers))
        replays = [n for many, times in zip(layers, (1, 1, 2), strict=True) for n in [times] * (2 * many * batches)]
        assert [replayed for _, replayed in found] == replays, "each capture serves the iterations up to the next move"
        assert measured == layers[-1] * batches
    stayed = train(model.pool, ranks, base=model.argv(f"{flags} --train-iters 5"), parameters=True)
    assert_close(join([run for run, *_ in results]), stayed)


@pytest.mark.exhaustive
def test_graphs_of_layers_in_parts_that_moved_are_captured_anew(model_of):
    """With graphs of delayed weight gradients of their own."""
    model = model_of(f"{EXPERTS} --num-layers 5 --global-batch-size 8")
    flags = (
        f"--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Et|tt|t|tL {GRADIENTS} "
        "--expert-model-parallel-size 2 --moe-grouped-gemm --train-iters 5"
    )
    graphs = DELAYED.replace(" moe_preprocess", "")  # which gathers counts, as gloo cannot within a graph
    argv = model.argv(f"{flags} {graphs} --balance-layers")
    results = model.pool.run(4, _move_on_graphs, argv, {2: ((2, 1), (1, 1)), 3: ((1, 1), (1, 2))})
    for rank, (_, found, measured) in enumerate(results):
        layers = [2, 3, 2] if rank < 2 else [3, 2, 3]
        batches = len(found) // (3 * sum(layers))
        replays = [n for many, times in zip(layers, (1, 1, 2), strict=True) for n in [times] * (3 * many * batches)]
        assert [replayed for _, replayed in found] == replays, "each capture serves the iterations up to the next move"
        assert measured >= layers[-1] * batches
    stayed = train(model.pool, 4, base=model.argv(flags), parameters=True)
    assert_close(join([run for run, *_ in results]), stayed, 1e-5, 1e-4)


def _capture() -> dict[str, Any]:
    """What a replay does after each of: nothing, another input, a decision of Python, a weight that moved."""
    import torch

    from tests.support.stand_ins import cuda_graphs

    cuda_graphs.install()
    weight, rows, doubles = torch.nn.Parameter(torch.eye(3)), torch.ones(2, 3), [False]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = rows @ weight
        out = out * 2 if doubles[0] else out + 1
    found: dict[str, Any] = {}

    def replay(name: str) -> None:
        try:
            graph.replay()
            found[name] = out.sum().item()
        except AssertionError as error:
            found[name] = str(error)

    replay("nothing")
    rows.fill_(2)
    replay("input")
    doubles[0] = True
    replay("decision")
    weight.data = weight.data.clone()
    replay("weight")
    try:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            rows.sum().item()
    except RuntimeError as error:
        found["read"] = str(error)
    return found


def test_a_replay_is_what_was_captured(engine):
    (found,) = engine.run(1, _capture)
    assert (found["nothing"], found["input"], found["decision"]) == (12, 18, 18)
    assert "a weight of shape (3, 3) is not where it was captured" in found["weight"]
    assert "not permitted when stream is capturing" in found["read"]


def test_the_stand_in_has_the_interface_of_torch():
    import torch

    from tests.support.stand_ins import cuda_graphs

    for name in ("replay", "reset", "pool"):
        theirs, own = (getattr(cls, name) for cls in (torch.cuda.CUDAGraph, cuda_graphs.CUDAGraph))
        assert list(inspect.signature(own).parameters) == list(inspect.signature(theirs).parameters), name
    given = list(inspect.signature(torch.cuda.graph.__init__).parameters)[1:]
    own = list(inspect.signature(cuda_graphs._graph).parameters)
    assert own[:3] == given[:3] == ["cuda_graph", "pool", "stream"]

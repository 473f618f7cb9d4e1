"""Replicas of experts, and layers that move, in iterations that one CUDA graph holds, and in those that run again as
tokens exceed a budget.

Megatron-LM's own code captures, replays, asks whether tokens were dropped and runs the iteration again;
`tests.support.stand_ins.captured_iterations` is in the place of the graph, of HybridEP and of the fused experts.
"""

from typing import Any

import pytest

from tests.support import training
from tests.support.moving import at_end_of_step, move_at, moving_rank
from tests.support.sampled import sampled
from tests.support.set_clock import SetClock, TwoStreams, slow_layers
from tests.support.settings import settings
from tests.support.training import EXACT, MOCK_DATA, RankRun, join, train_rank
from tests.support.transformer_engine.model import EXPERTS, assert_close
from tests.transformer_engine.test_graphs import _use_torchs_adam

MODEL = f"{EXPERTS.replace('--num-experts 4', '--num-experts 8')} --moe-router-dtype fp32"
LAYOUT = (
    "--expert-model-parallel-size 2 --moe-grouped-gemm --use-transformer-engine-op-fuser --moe-permute-fusion "
    "--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend hybridep"
)
BALANCED = f"--balance-experts {settings('experts', min_gain=0)}"
ITERATIONS = (
    "--cuda-graph-impl full_iteration --no-check-for-nan-in-loss-and-grad --cuda-graph-warmup-steps 2 --train-iters 12"
)
GRAPH = f"{ITERATIONS} {settings('experts', plan_interval=6)}"


def _train(argv: list[str], plans: Any = None) -> tuple[RankRun, dict[str, Any]]:
    """Train, with layers that move by `plans`, if any. Returns the run and what was seen: graphs as (messages,
    replays), placements of the first layer by iteration, and how often an iteration ran again."""
    from megatron.core.transformer.moe.paged_stash import PagedStashRunner

    from balancing.experts import plan
    from megatron.balanced.experts.balancer import ExpertBalancer
    from tests.support.stand_ins import captured_iterations

    plan.CALM = 0.0  # no placement stays, so that each due plan captures the graph anew
    captured_iterations.install()
    if plans is not None:
        move_at(plans)
    again, placements, experts = [], [], []
    prepare, begin = PagedStashRunner.prepare_for_rerun, ExpertBalancer.begin_schedule

    def prepare_for_rerun(self: Any, is_training: bool = True) -> None:
        again.append(is_training)
        prepare(self, is_training)

    def begin_schedule(self: Any) -> None:
        begin(self)
        placements.append([layer.placement.replicas for layer in self._layers()])
        experts.append(self)

    PagedStashRunner.prepare_for_rerun, ExpertBalancer.begin_schedule = prepare_for_rerun, begin_schedule
    run = train_rank(argv, True)
    graphs = [(graph.messages, graph.replays) for graph in captured_iterations.captured]
    return run, {"graphs": graphs, "replicas": placements, "again": len(again)}


@pytest.mark.exhaustive
def test_iterations_run_again_where_tokens_exceed_the_budget(model_of):
    model = model_of(MODEL)
    # HybridEP's budget is a multiple of 256 rows: here half the mean, so that each iteration runs again.
    batches = "--micro-batch-size 8 --global-batch-size 16 --train-iters 3"
    budget = "--moe-expert-rank-capacity-factor 0.4 --moe-paged-stash"
    results = model.pool.run(2, _train, model.argv(f"{LAYOUT} {BALANCED} {batches} {budget}"))
    for _, seen in results:
        assert seen["again"] == 3 and len(seen["replicas"]) == 6 and any(seen["replicas"][-1]), seen
    assert_close(join([run for run, _ in results]), model.alone(f"--moe-grouped-gemm {batches}"), 1e-5, 1e-4)


CAPACITY = "--moe-expert-rank-capacity-factor 2.0"
OVERLAPS = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 2000"
DELAYED = "--overlap-moe-expert-parallel-comm --delay-wgrad-compute"
# The validation before iteration 8, where the graph is captured anew, has gathered parameters already.
VALIDATED = "--eval-interval 4 --eval-iters 1"
# ranks, flags
CASES = {
    "EP 2": (2, f"{CAPACITY} --moe-paged-stash"),
    "EP 2, messages overlapped": (2, f"{CAPACITY} --overlap-moe-expert-parallel-comm"),
    "EP 2, slots shared": (2, f"{CAPACITY} {settings('experts', replica_mode='shared')}"),
    "EP 2, weight gradients delayed": (2, f"{CAPACITY} {DELAYED}"),
    "EP 2, both overlaps": (2, f"{CAPACITY} {OVERLAPS}"),
    "EP 2, DP 2, both overlaps, validated": (4, f"{CAPACITY} {OVERLAPS} {VALIDATED}"),
    "EP 2, DP 2, as recipes do": (4, f"{CAPACITY} --moe-paged-stash {DELAYED} {OVERLAPS}"),
    "EP 4, both overlaps": (4, f"{CAPACITY} {OVERLAPS} --expert-model-parallel-size 4"),
}


@pytest.mark.parametrize("case", sampled(CASES, "EP 2, both overlaps"))
def test_a_graph_of_iterations_with_replicas_changes_no_number(model_of, case):
    ranks, flags = CASES[case]
    model = model_of(MODEL)
    batch = f"--global-batch-size {2 * ranks} --split 90,10,0"
    results = model.pool.run(ranks, _train, model.argv(f"{LAYOUT} {flags} {BALANCED} {GRAPH} {batch}"))
    for _, seen in results:
        assert not seen["again"]
        # Without a graph: 0, and 1 and 2 after the first plan. Captured at 3, anew at 8.
        assert [replays for _, replays in seen["graphs"][:2]] == [3, 4], seen
        assert len({tuple(each) for each in seen["replicas"]}) > 1 and any(seen["replicas"][-1])
    alone = model.alone(f"--moe-grouped-gemm --train-iters 12 {batch}")
    assert_close(join([run for run, _ in results]), alone, 1e-5, 1e-4)


def test_a_placement_before_a_skipped_iteration_is_captured_after_it(model_of):
    model = model_of(MODEL)
    batch = "--global-batch-size 4 --split 90,10,0 --iterations-to-skip 7"
    results = model.pool.run(2, _train, model.argv(f"{LAYOUT} {CAPACITY} {BALANCED} {GRAPH} {batch}"))
    for _, seen in results:
        assert [replays for _, replays in seen["graphs"]] == [3, 3], seen
    alone = model.alone(f"--moe-grouped-gemm --train-iters 12 {batch}")
    assert_close(join([run for run, _ in results]), alone, 1e-5, 1e-4)


# With experts, the placement of 1 is captured at 3, and that of 6 would be at 8, before which layers move again.
INTERLEAVED = "--pipeline-model-parallel-size 2 --num-layers 5 --pipeline-model-parallel-layout Et|tt|t|tL"
THERE_AND_BACK = {4: ((2, 1), (1, 1)), 8: ((1, 1), (1, 2))}
# flags, replays of each graph
MOVED_CASES = {
    "layers alone": (f"{ITERATIONS} {OVERLAPS}", [2, 2, 2]),
    "with experts": (f"{GRAPH} {BALANCED}", [1, 2]),
    "with experts, as recipes do": (f"{GRAPH} {DELAYED} {OVERLAPS} {BALANCED}", [1, 2]),
}


@pytest.mark.parametrize("case", sampled(MOVED_CASES, "with experts, as recipes do"))
def test_layers_with_experts_move_and_the_graph_is_captured_anew(model_of, case):
    flags, replays = MOVED_CASES[case]
    model = model_of(f"{MODEL} --num-layers 5")
    batch = "--global-batch-size 8 --split 90,10,0"
    argv = model.argv(f"{LAYOUT} {INTERLEAVED} {CAPACITY} --moe-paged-stash {flags} {batch} --balance-layers")
    results = model.pool.run(4, _train, argv, THERE_AND_BACK)
    for _, seen in results:
        assert not seen["again"] and [n for _, n in seen["graphs"]] == replays, seen
    alone = model.alone(f"--moe-grouped-gemm --train-iters 12 {batch}")
    assert_close(join([run for run, _ in results]), alone, 1e-5, 1e-4)


def test_tokens_of_layers_that_moved_are_counted(model_of):
    """Each iteration runs again, without the budget for all layers, also for those that have just arrived."""
    model = model_of(MODEL)
    batches = "--micro-batch-size 8 --global-batch-size 16 --train-iters 3 --pipeline-model-parallel-size 2"
    flags = f"{LAYOUT} {batches} --moe-expert-rank-capacity-factor 0.4 --moe-paged-stash --balance-layers"
    results = model.pool.run(4, _train, model.argv(flags), {1: ((1,), (3,)), 2: ((3,), (1,))})
    for _, seen in results:
        assert seen["again"] == 3, seen
    alone = model.alone("--moe-grouped-gemm --micro-batch-size 8 --global-batch-size 16 --train-iters 3")
    assert_close(join([run for run, _ in results]), alone, 1e-5, 1e-4)


DENSE = [
    *training.MODEL,
    *MOCK_DATA,
    *EXACT,
    *"--transformer-impl local --te-rng-tracker --no-rope-fusion --swiglu --disable-bias-linear".split(),
    *"--init-method-std 0.1 --split 90,10,0 --eval-interval 2 --eval-iters 2 --train-iters 12".split(),
]


def _exactly() -> None:
    """In float64, which Transformer Engine does not have, with its random generator, which graphs need."""
    from megatron.core.transformer import transformer_block
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    from tests.support.stand_ins import captured_iterations

    captured_iterations.install()
    _use_torchs_adam()
    transformer_block.LayerNormImpl = WrappedTorchNorm


def _train_exactly(argv: list[str]) -> RankRun:
    _exactly()
    return train_rank(argv, True)


def _replays() -> list[int]:
    from tests.support.stand_ins import captured_iterations

    return [graph.replays for graph in captured_iterations.captured]


def _move_exactly(argv: list[str], plans: Any) -> tuple[RankRun, list[int], int]:
    """Train with layers that move. Returns the run, the replays of each graph, and how often chunks were wrapped, each
    time on the stream of captures."""
    import torch
    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.full_cuda_graph import get_shared_capture_stream

    _exactly()
    TwoStreams().install()
    wrap, streams = DistributedDataParallel.__init__, []

    def wrapped(*args: Any, **kwargs: Any) -> None:
        streams.append(torch.cuda.current_stream())
        wrap(*args, **kwargs)

    DistributedDataParallel.__init__ = wrapped
    run, _ = moving_rank(argv, plans)
    assert {*streams} == {get_shared_capture_stream()}, "a capture allows no node of another stream"
    return run, _replays(), len(streams)


PP2 = "--pipeline-model-parallel-size 2"
# ranks, flags, plans. Graphs are of training and validation.
EXACT_CASES = {
    "PP 2": (2, PP2, {4: ((1,), (3,)), 8: ((3,), (1,))}),
    "PP 2, DP 2, both overlaps": (4, f"{PP2} {OVERLAPS}", {4: ((1,), (3,)), 8: ((3,), (1,))}),
    "interleaved": (
        2,
        f"{PP2} --num-layers 6 --pipeline-model-parallel-layout Et|tt|t|ttL",
        {4: ((2, 1), (1, 2)), 8: ((1, 2), (1, 2))},
    ),
    "PP 3, a stage without changes": (
        3,
        "--pipeline-model-parallel-size 3 --num-layers 6",
        {4: ((1,), (2,), (3,)), 8: ((1,), (3,), (2,))},
    ),
}


@pytest.mark.parametrize("case", sampled(EXACT_CASES, "PP 2, DP 2, both overlaps", "interleaved"))
def test_moves_between_graphs_of_iterations_change_no_number(engine, case):
    ranks, flags, plans = EXACT_CASES[case]
    argv = [*DENSE, *flags.split()]
    results = engine.run(ranks, _move_exactly, [*argv, *f"{ITERATIONS} --balance-layers".split()], plans)
    # Of training: 2 and 3, 6 and 7, 10 and 11. Of validation: twice after 4 and 8, and six times from 12 on.
    for _, replays, wraps in results:
        assert sorted(replays) == [2, 2, 2, 2, 2, 6] and wraps == 3 * len(plans[4][0]), (replays, wraps)
    moved = join([run for run, *_ in results])
    stayed = join(engine.run(ranks, _train_exactly, argv))
    training.assert_close(moved, stayed)
    assert moved.validation == pytest.approx(stayed.validation, rel=1e-6) and len(moved.validation) > 5


def _decide(argv: list[str]) -> tuple[RankRun, list[int], list[Any], list[int]]:
    """Train with layers of which the first takes three times as long. A replay takes as long as what was captured.
    Returns the run, the replays of each graph, the layers of each stage after each step, and the iterations that were
    measured."""
    from megatron.balanced.layers.planning import LayerPlanner
    from tests.support.stand_ins.captured_iterations import Graph

    _exactly()
    clock = SetClock().install()
    slow_layers(clock, lambda layer: (3.0, 6.0) if layer == 0 else (1.0, 2.0))
    worked: dict[Any, float] = {}
    begin, end, replay = Graph.__init__, Graph.undo, Graph.replay

    def begin_capture(self: Any, keep_graph: bool = False) -> None:
        begin(self, keep_graph)
        worked[self] = -clock.mark()[1]

    def end_capture(self: Any) -> None:
        end(self)
        worked[self] += clock.mark()[1]
        clock.work(-worked[self])  # nothing has run

    def replayed(self: Any) -> None:
        clock.work(worked[self])
        replay(self)

    Graph.__init__, Graph.undo, Graph.replay = begin_capture, end_capture, replayed
    plans: list[Any] = []
    measured: list[int] = []
    add = LayerPlanner.add

    def added(self: Any, iteration: int, record: Any, micro_batches: int) -> None:
        measured.append(iteration)
        add(self, iteration, record, micro_batches)

    LayerPlanner.add = added
    at_end_of_step(lambda balancer: plans.append([len(stage[0]) for stage in balancer.mover.plan.chunks]))
    run = train_rank(argv, True)
    return run, _replays(), plans, measured


def test_layers_are_measured_without_the_graph_and_move(engine):
    argv, long = [*DENSE, *f"{PP2} --eval-iters 0".split()], "--train-iters 16"
    given = f"{ITERATIONS} {long} --balance-layers --layer-balance-interval 4".split()
    results = engine.run(2, _decide, [*argv, *given])
    for _, replays, plans, measured in results:
        # Layers are measured at 1 and 5: the first alone decides before 4, none before 12. Iterations 2 and 6 capture.
        assert plans == [[2, 2]] * 4 + [[1, 3]] * 12 and replays == [2, 10], (plans, replays)
        assert measured == [1, 5, *range(7, 14)], measured
    stayed = join(engine.run(2, _train_exactly, [*argv, *long.split()]))
    training.assert_close(join([run for run, *_ in results]), stayed)

"""Replicas of experts in iterations that one CUDA graph holds, and in those that run again as tokens exceed a budget.

Megatron-LM's own code captures, replays, asks whether tokens were dropped and runs the iteration again;
`tests.support.stand_ins.captured_iterations` is in the place of the graph, of HybridEP and of the fused experts.
"""

from typing import Any

import pytest

from tests.support.sampled import sampled
from tests.support.settings import settings
from tests.support.training import RankRun, join, train_rank
from tests.support.transformer_engine.model import EXPERTS, assert_close

MODEL = f"{EXPERTS.replace('--num-experts 4', '--num-experts 8')} --moe-router-dtype fp32"
LAYOUT = (
    "--expert-model-parallel-size 2 --moe-grouped-gemm --use-transformer-engine-op-fuser --moe-permute-fusion "
    "--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend hybridep"
)
BALANCED = f"--balance-experts {settings('experts', min_gain=0)}"
GRAPH = (
    "--cuda-graph-impl full_iteration --no-check-for-nan-in-loss-and-grad --cuda-graph-warmup-steps 2 "
    f"{settings('experts', plan_interval=6)} --train-iters 12"
)


def _train(argv: list[str]) -> tuple[RankRun, dict[str, Any]]:
    """Train. Returns the run and what was seen: graphs as (messages, replays), placements of the first layer by
    iteration, and how often an iteration ran again."""
    from megatron.core.transformer.moe.paged_stash import PagedStashRunner

    from balancing.experts import plan
    from megatron.balanced.experts.balancer import ExpertBalancer
    from tests.support.stand_ins import captured_iterations

    plan.CALM = 0.0  # no placement stays, so that each due plan captures the graph anew
    captured_iterations.install()
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

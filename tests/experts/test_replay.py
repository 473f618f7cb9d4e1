"""Routing that is replayed (`--moe-enable-routing-replay`) and known before its step: no placement is wrong."""

from typing import Any

import pytest

from tests.experts.test_recipes import QWEN3, SIZES
from tests.support.sampled import sampled
from tests.support.settings import settings
from tests.support.training import EXACT, MOCK_DATA, MODEL, RankRun, assert_close, join, train_rank

BALANCE = f"--balance-experts {settings('experts', min_gain=0)}"
FLAGS = f"{QWEN3} --moe-token-dispatcher-type alltoall --moe-enable-routing-replay --mtp-num-layers 1"
# ranks, flags
LAYOUTS = {
    "EP 2": (2, ""),
    "EP 2, TP 2": (
        4,
        "--tensor-model-parallel-size 2 --sequence-parallel --expert-tensor-parallel-size 2 --micro-batch-size 2",
    ),
}


EXPERTS = 8  # as QWEN3 has them


def _routed(argv: list[str], recorded: list | None) -> tuple[RankRun, list, int]:
    """Record the routing of each step, or replay `recorded` and tell it beforehand: [step][micro-batch][router].

    Returns the run, its routing, and how many placements differ from those for the load that the step had.
    """
    import torch
    from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

    from megatron.balanced.experts.balancer import ExpertBalancer
    from megatron.balanced.experts.replay import count_routed
    from megatron.balanced.shared import callbacks

    steps: list[list[Any]] = []
    wrong = 0
    record, replay = RouterReplay.record_indices, RouterReplay.get_replay_topk

    def note(self: Any, topk_indices: Any) -> None:
        steps[-1].append(topk_indices.clone())
        record(self, topk_indices)

    def next_target(self: Any, *args: Any, **kwargs: Any) -> Any:
        if recorded is not None:
            of_step = [given for micro_batch in recorded[len(steps) - 1] for given in micro_batch]
            self.set_target_indices(of_step[len(steps[-1])])
            steps[-1].append(self.target_topk_idx)
        return replay(self, *args, **kwargs)

    RouterReplay.record_indices, RouterReplay.get_replay_topk = note, next_target

    class Routing(callbacks.StepCallback):
        def begin_step(self, iteration: int, config: Any) -> None:
            steps.append([])
            action = RouterReplayAction.RECORD if recorded is None else RouterReplayAction.REPLAY_FORWARD
            RouterReplay.set_global_router_replay_action(action)
            if recorded is not None:
                self.run.will_route([count_routed(torch.stack(step, 1), EXPERTS) for step in recorded[iteration]])

        def end_step(self) -> None:
            nonlocal wrong
            for balancer in self.run.balancers:
                if isinstance(balancer, ExpertBalancer):
                    for chunk in balancer._chunk_at.values():
                        for layer in chunk.layers:
                            right = balancer._planner.place_known(layer, layer.loads, balancer._overlap(chunk, layer))
                            wrong += right.placement.digest() != balancer._plans[layer].placed.digest()

    run = train_rank(argv, True, callbacks=[Routing()])
    routers = len(RouterReplay.global_router_replay_instances)
    routing = [[step[at : at + routers] for at in range(0, len(step), routers)] for step in steps]
    return run, routing, wrong


@pytest.mark.parametrize("layout", sampled(["EP 2", "EP 2, TP 2"], "EP 2"))
def test_no_placement_is_wrong_where_routing_is_known(pool, layout):
    ranks, flags = LAYOUTS[layout]
    argv = [*MODEL, *MOCK_DATA, *EXACT, *SIZES.split(), *f"{FLAGS} {flags}".split()]
    plain = pool.run(ranks, _routed, argv, None)
    predicted = pool.run(ranks, _routed, [*argv, *BALANCE.split()], None)
    recorded = [routing for _, routing, _ in plain]
    known = pool.run(ranks, _known, [*argv, *BALANCE.split()], recorded)
    assert all(wrong > 2 for _, _, wrong in predicted), "the load hardly changes, so nothing was tested"
    assert [wrong for _, _, wrong in known] == [0] * ranks
    for seen in (predicted, known):
        assert_close(join([run for run, _, _ in seen]), join([run for run, _, _ in plain]))


def _known(argv: list[str], recorded: list) -> tuple[RankRun, list, int]:
    import os

    return _routed(argv, recorded[int(os.environ["RANK"])])

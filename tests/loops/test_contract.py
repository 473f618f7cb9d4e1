"""One loop that imitates what the loops of others do, with balanced experts and sequences: no number changes.

As reinforcement learning does, it repeats: offload for a rollout, a pass for log-probabilities that records the
routing, and training steps that replay it. Schedules have other numbers of micro-batches from step to step, and a step
may have several. Sequences are ragged and packed, with an advantage for each token. The loop looks schedules up itself,
has torch's optimizer, and finalizes gradients by hand. Replicas are planned after a step has ended, as they are where
hosts are busy.
"""

import threading
from typing import Any

import numpy as np
import pytest

from tests.support.patience import PATIENCE

ROLLOUTS, RANKS, EXPERTS, LONGEST = 2, 2, 8, 768
# Of a rollout: [step][schedule] -> micro-batches. With reductions under backward passes, a step has one schedule.
STEPS = {"several": [[3], [1, 2], [2, 1, 1]], "overlap": [[3], [1], [4]]}
MICRO_BATCHES = {"several": 10, "overlap": 8}


def _sample(number: int, replica: int) -> dict[str, Any]:
    """Micro-batch `number` of a rank: tokens, labels and advantages of sequences of different lengths."""
    import torch
    from megatron.core.packed_seq_params import PackedSeqParams

    draw = np.random.default_rng((number, replica))
    lengths = [576, 24] if (number + replica) % 2 else [48, *draw.integers(16, 100, 3)]
    bounds = torch.tensor(np.cumsum([0, *lengths]), dtype=torch.int32)
    tokens, places = int(bounds[-1]), torch.cat([torch.arange(length) for length in lengths])
    return {
        "number": number,
        "tokens": torch.from_numpy(draw.integers(0, 12, tokens)),
        "labels": torch.from_numpy(draw.integers(0, 12, tokens)),
        "places": places,
        "advantages": torch.from_numpy(draw.normal(size=tokens)),
        "packed": PackedSeqParams(qkv_format="thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds),
    }


def _train(
    balanced: bool, steps: str
) -> tuple[list[float], dict[str, np.ndarray], list[dict[str, np.ndarray]], list[dict], list[str]]:
    """Returns losses, weights, the gradients of each step, events, and what was refused."""
    import torch

    from tests.support.small_moe import build
    from tests.support.weights import ADAM_EPS, named_weights

    torch.set_default_dtype(torch.float64)
    overlap = steps == "overlap"
    model = build(torch.float64, longest=LONGEST, overlap=overlap, moe_enable_routing_replay=True)
    import torch.distributed as dist
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
    from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

    from balancing.cluster import Cluster
    from balancing.experts.config import ExpertConfig
    from megatron.balanced.experts import planning
    from megatron.balanced.experts.moe_layer import BalancedMoELayer
    from megatron.balanced.experts.replay import count_routed
    from megatron.balanced.loop import Balancers, ExpertBalancer, SequenceBalancer
    from megatron.balanced.shared.job import Job

    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, eps=ADAM_EPS)
    model.config.no_sync_func = model.no_sync if overlap else None
    plain, events, refused = get_forward_backward_func(), [], []
    ended, plan = threading.Event(), planning.ReplicaPlanner._plan

    def plan_late(*args: Any, **named: Any) -> Any:
        assert ended.wait(PATIENCE)
        return plan(*args, **named)

    planning.ReplicaPlanner._plan = plan_late
    if balanced:
        told: Any = {"job": Job(LONGEST, 1, 5), "report": events.append}
        # So slow that even these short sequences are worth a move.
        sequences = SequenceBalancer([model], cluster=Cluster(1, RANKS, 1, 1e12, 1e12, 1e6, 1e9), **told)
        fast = Cluster(1, RANKS, 1, 1e12, 1e12, 1e9, 1e9)  # replicas arrive before they are needed
        experts = ExpertBalancer([model], ExpertConfig(enabled=True, min_gain=0.0), cluster=fast, **told)
        balancers = Balancers(experts, sequences)
        balancers.install()
    routed: dict[int, list[Any]] = {}  # number of a micro-batch -> experts, [router] int [token, k]

    def forward_step(samples: Any, model: Any) -> Any:
        sample = next(samples)
        if sample["number"] in routed:
            RouterReplay.set_replay_data(routed[sample["number"]])
        losses = model(
            sample["tokens"][None], sample["places"][None], None, labels=sample["labels"][None],
            packed_seq_params=sample["packed"],
        )  # fmt: skip
        if sample["number"] not in routed:
            routed[sample["number"]] = [indices.clone() for indices in RouterReplay.get_recorded_data()]

        def loss(output: Any) -> Any:
            of_policy = (output.flatten() * sample["advantages"]).mean()
            return of_policy, {"loss": of_policy.detach(), "log_probabilities": -output.detach().flatten()}

        return losses, loss

    found: list[float] = []
    gradients = []

    def call(numbers: list[int], forward_only: bool = False) -> None:
        run = get_forward_backward_func()
        samples = [_sample(number, dist.get_rank()) for number in numbers]
        if balanced and not forward_only:
            experts.will_route([count_routed(torch.stack(routed[number], 1), EXPERTS) for number in numbers])
        given = run(
            forward_step_func=forward_step, data_iterator=iter(samples), model=[model], num_microbatches=len(samples),
            seq_length=LONGEST, micro_batch_size=1, forward_only=forward_only,
        )  # fmt: skip
        found.extend(float(each["loss"]) for each in given)
        found.extend(float(each["log_probabilities"].sum()) for each in given)
        layers = [module for module in model.modules() if isinstance(module, BalancedMoELayer)]
        assert len(layers) == 2 * balanced and not any(layer.active for layer in layers), "not as the plain model"
        if balanced and not forward_only:
            ended.set()
            experts._planner.wait()
            ended.clear()

    for rollout in range(ROLLOUTS):
        numbers = [*range(rollout * MICRO_BATCHES[steps], (rollout + 1) * MICRO_BATCHES[steps])]
        if balanced:
            experts.release()
            assert all(module.slots is None for module in model.modules() if hasattr(module, "position"))
            if not rollout:
                for wrong in ([torch.zeros(1, EXPERTS)], [torch.zeros(2, EXPERTS)]):
                    with pytest.raises(ValueError) as error:
                        experts.will_route(wrong)
                        get_forward_backward_func()(model=[model], num_microbatches=1, forward_only=False)
                    refused.append(str(error.value))
            experts.restore()
        RouterReplay.set_global_router_replay_action(RouterReplayAction.RECORD)
        model.eval()
        call(numbers, forward_only=True)
        model.train()
        RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
        for schedules in STEPS[steps]:
            for parameter in model.parameters():
                parameter.grad = None
            model.zero_grad_buffer()
            for micro_batches in schedules:
                call([numbers.pop(0) for _ in range(micro_batches)])
                call([0], forward_only=True)  # an evaluation in between, of a model in training mode
            finalize_model_grads([model])
            for parameter in model.parameters():
                parameter.grad = parameter.main_grad
            gradients.append(named_weights([model.module], gradients=True))
            optimizer.step()
        assert not numbers
        RouterReplay.clear_global_indices()
    if balanced:
        experts._planner.adopt()  # raises what a plan has raised
        balancers.close()
    assert get_forward_backward_func() is plain
    return found, named_weights([model.module]), gradients, [event() for event in events], refused


@pytest.mark.parametrize("steps", STEPS)
def test_what_other_loops_do_changes_no_number(pool, steps):
    from tests.support.weights import assert_same_gradients, assert_same_weights

    balanced, plain = (pool.run(RANKS, _train, on, steps) for on in (True, False))
    for (losses, *_), (expected, *_) in zip(balanced, plain, strict=True):
        np.testing.assert_allclose(losses, expected, rtol=1e-12)
    for step in range(ROLLOUTS * len(STEPS[steps])):
        assert_same_gradients(*([gradients[step] for *_, gradients, _, _ in run] for run in (balanced, plain)))
    assert_same_weights([weights for _, weights, *_ in balanced], [weights for _, weights, *_ in plain])
    events = [event for *_, told, _ in balanced for event in told]
    schedules = ROLLOUTS * sum(map(len, STEPS[steps]))
    for name in ("experts", "sequences"):
        of = [event for event in events if event["balancer"] == name]
        assert {event["iteration"] for event in of} == set(range(1, schedules + 1)), "one a schedule"
        before, after = (np.mean([event[f"imbalance_{when}"] for event in of]) for when in ("before", "after"))
        assert before > 1.1 and after - 1 < 0.5 * (before - 1), name
    of_experts = [event for event in events if event["balancer"] == "experts"]
    assert {event["plan_age"] for event in of_experts} == {0}, "placed by a prediction"
    assert any(event["replicas"] for event in of_experts if event["iteration"] == 1)
    for *_, refused in balanced:
        assert "shape [1, 8]" in refused[0] and "[2, 8]" in refused[0]
        assert "call restore()" in refused[1] and not any("\n" in line for line in refused)


def _partly_known() -> list[tuple[int, int, int]]:
    """Two steps; before the second, only the load of layer 0 is announced. Returns step, layer and age of each plan."""
    import torch
    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

    from balancing.experts.config import ExpertConfig
    from megatron.balanced.loop import Balancers, ExpertBalancer
    from megatron.balanced.shared.job import Job
    from tests.support.small_moe import SAMPLES, SEQUENCE, build, call, forward_steps

    model, events = build(torch.float32, overlap=False), []
    job = Job(SEQUENCE, SAMPLES, 5)
    experts = ExpertBalancer([model], ExpertConfig(enabled=True), job=job, report=events.append)
    balancers = Balancers(experts)
    run, forward_step = balancers.schedule(get_forward_backward_func()), forward_steps()
    call(run, model, forward_step, 1)
    experts._planner.wait()
    balancers.will_route([torch.tensor([[400, 112, *[0] * 6], [0] * EXPERTS])])
    call(run, model, forward_step, 1)
    return [(event["iteration"], event["layer"], event["plan_age"]) for event in (event() for event in events)]


def test_a_layer_whose_routing_is_not_known_keeps_its_prediction(pool):
    assert pool.run(RANKS, _partly_known)[0] == [(1, 0, 0), (1, 1, 0), (2, 0, 0), (2, 1, 1)]

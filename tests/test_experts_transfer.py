"""Replica slots on two ranks, without a model: what is brought when, and that it is right."""

import numpy as np
import pytest

LAYERS, SIZE = 5, 6


def _slots(used, shared):
    """On one of two ranks: slots over layers with two experts, of which those in `used` have replicas of both."""
    import torch
    import torch.distributed as dist

    from balancing.experts.apply import ReplicaSlots
    from balancing.experts.placement import ReplicaPlacement

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    homes = [[[torch.full((SIZE,), 10.0 * layer + rank, requires_grad=True)]] for layer in range(LAYERS)]
    for (weight,) in (layer[0] for layer in homes):
        weight.main_grad = torch.zeros(SIZE)
    home = np.arange(2)
    placements = [ReplicaPlacement(home, [[1], [0]] if layer in used else [[-1], [-1]]) for layer in range(LAYERS)]
    slots = ReplicaSlots(
        homes, 1, dist.group.WORLD, shared=shared, gradient=lambda weight: weight.main_grad, reduced=lambda layer: None
    )
    return slots, placements, homes, rank


def _transfers(used, shared):
    """Layers whose weights were sent so far, after each step, and whether weights and gradients were right."""
    slots, placements, homes, rank = _slots(used, shared)

    def sent():
        return [layer for layer in range(LAYERS) if slots.moved_bytes(layer)]

    slots.begin_step(placements, 1)
    seen = [sent()]
    for layer in used:
        slots.acquire(layer, forward=True)
        ((weight,),) = slots.leaves(layer)
        assert (weight == 10 * layer + 1 - rank).all()
        seen.append(sent())
    for layer in reversed(used):
        slots.acquire(layer, forward=False)
        ((weight,),) = slots.leaves(layer)
        assert (weight == 10 * layer + 1 - rank).all()
        (weight * (layer + 1)).sum().backward()
        slots.collect(layer)
    slots.end_step()
    for layer in range(LAYERS):
        assert (homes[layer][0][0].main_grad == (layer + 1 if layer in used else 0)).all()
    return seen


@pytest.mark.parametrize(
    ("used", "shared", "expected"),
    [
        ([1, 3, 4], False, [[1], [1, 3], [1, 3, 4], [1, 3, 4]]),
        ([0, 4], False, [[0], [0, 4], [0, 4]]),
        ([1, 2, 3], True, [[1], [1, 2], [1, 2, 3], [1, 2, 3]]),
        # Layers 2 and 4 share a buffer, so 4 cannot come while 2 is in use.
        ([1, 2, 4], True, [[1], [1, 2], [1, 2], [1, 2, 4]]),
        ([0, 3], True, [[0], [0, 3], [0, 3]]),
    ],
)
def test_the_next_layer_with_replicas_comes_while_one_is_in_use(pool, used, shared, expected):
    """Layers without replicas in between hold nothing up."""
    assert pool.run(2, _transfers, used, shared) == [expected] * 2

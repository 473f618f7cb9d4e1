"""Replica slots on two ranks, without a model: transfers start as soon as they may, with the right contents."""

import numpy as np
import pytest

from balancing.experts.engine.chains import Numbers
from balancing.pipeline import operations

LAYERS, SIZE = 5, 6

# layers with replicas, mode, pipeline stages -> where transfers start, as `_follow` says it
STARTS = {
    "01234 resident 1": "F0.n0+0 F0.e0+1 F0.e1+2 F0.e2+3 F0.e3+4 B1.n4+4 B1.n3+3 B1.n2+2 B1.n1+1 B1.n0+0",
    "01234 resident 3": "F0.n0+0 F0.e0+1 F0.e1+2 F0.e2+3 F0.e3+4 B5.n4+4 B5.n3+3 B5.n2+2 B5.n1+1 B5.n0+0",
    "01234 shared 1": (
        "F0.n0+0 F0.e0+1 F0.e1+2 F0.e2+3 F0.e3+4 B0.n4+4 B0.e3+2 B0.n3+3 B0.e2+1 B0.n2+2 B0.e1+0 B0.n1+1 B0.n0+0 "
        "F1.e1+2 F1.e2+3 F1.e3+4 B1.n4+4 B1.e3+2 B1.n3+3 B1.e2+1 B1.n2+2 B1.e1+0 B1.n1+1 B1.n0+0"
    ),
    "134 resident 1": "F0.n0+1 F0.e1+3 F0.e3+4 B1.n4+4 B1.n3+3 B1.n1+1",
    "134 shared 3": (
        "F0.n0+1 F0.e3+34 F1.e1+1 F1.e3+3 F2.e1+1 F2.e3+3 B0.n4+4 B0.n3+3 B0.e1+1 B0.n1+1 F3.e3+3 B1.n4+4 B1.n3+3 "
        "B1.e1+1 B1.n1+1 F4.e3+3 B2.n4+4 B2.n3+3 B2.e1+1 B2.n1+1 F5.e3+3 B3.n4+4 B3.n3+3 B3.e1+1 B3.n1+1 B4.e4+3 "
        "B4.n4+4 B4.n3+3 B4.e1+1 B4.n1+1 B5.e4+3 B5.n4+4 B5.n3+3 B5.e1+1 B5.n1+1"
    ),
    "04 resident 3": "F0.n0+0 F0.e0+4 B5.n4+4 B5.n0+0",
    "04 shared 1": "F0.n0+0 F0.e4+4 B0.n4+4 B0.e0+0 B0.n0+0 F1.e4+4 B1.n4+4 B1.e0+0 B1.n0+0",
    "124 shared 1": "F0.n0+1 F0.e1+2 F0.e4+4 B0.n4+4 B0.e2+2 B0.n2+2 B0.n1+1 F1.e4+4 B1.n4+4 B1.e2+2 B1.n2+2 B1.n1+1",
    "03 shared 3": (
        "F0.n0+0 F0.e0+3 B0.n3+3 B0.n0+0 B1.n3+3 B1.n0+0 B2.n3+3 B2.n0+0 B3.n3+3 B3.n0+0 B4.n3+3 B4.n0+0 B5.n3+3 "
        "B5.n0+0"
    ),
}


def _slots(used, shared, layers=LAYERS):
    """On one of two ranks: slots over layers with two experts, of which those in `used` have replicas of both."""
    import torch
    import torch.distributed as dist

    from balancing.experts.engine.slots import HomeExperts, ReplicaSlots
    from balancing.experts.placement import ReplicaPlacement

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    homes = [[[torch.full((SIZE,), 10.0 * layer + rank, requires_grad=True)]] for layer in range(layers)]
    for (weight,) in (layer[0] for layer in homes):
        weight.main_grad = torch.zeros(SIZE)
    placements = [
        ReplicaPlacement(np.arange(2), [[1], [0]] if layer in used else [[-1], [-1]]) for layer in range(layers)
    ]
    slots = ReplicaSlots(
        HomeExperts(homes, gradient=lambda weight: weight.main_grad),
        1,
        dist.group.WORLD,
        shared=shared,
    )
    return slots, placements, homes, rank


def _follow(used, shared, stages):
    """Run the passes of the first of `stages` stages. Returns where transfers start: "compute+layers", in order.

    Compute is "F0.n1": forward pass 0, what comes before the experts of layer 1; "e" are its experts, "B" is a
    backward pass.
    """
    micro_batches = 2 * stages
    slots, placements, homes, rank = _slots(used, shared)
    slots.begin_step(placements, micro_batches)
    started, seen = [0] * LAYERS, []

    def look(compute):
        now = [slots.moved_bytes(layer) // (2 * SIZE * 4) for layer in range(LAYERS)]
        new = "".join(str(layer) * (now[layer] - started[layer]) for layer in range(LAYERS))
        started[:] = now
        if new:
            seen.append(f"{compute}+{new}")

    for kind, _, number in operations(stages, micro_batches)[0]:
        is_forward = kind == "forward"
        name = f"{'F' if is_forward else 'B'}{number}"
        for layer in range(LAYERS) if is_forward else reversed(range(LAYERS)):
            if is_forward:
                look(f"{name}.n{layer}")
            if layer in used:
                slots.acquire(layer, forward=is_forward)
                ((weight,),) = slots.leaves(layer)
                assert (weight == 10 * layer + 1 - rank).all()
            look(f"{name}.e{layer}")
            if not is_forward:
                if layer in used:
                    (weight * (layer + 1)).sum().backward()
                    slots.accumulate_gradients(layer)
                slots.end_pass(layer)
                look(f"{name}.n{layer}")
    slots.end_step()
    for layer in range(LAYERS):
        assert (homes[layer][0][0].main_grad == (micro_batches * (layer + 1) if layer in used else 0)).all()
    return " ".join(seen)


@pytest.mark.parametrize("case", STARTS)
def test_transfers_set_out_as_soon_as_they_may(pool, case):
    """Weights of the first layer leave when the step begins, those of the next one when a layer's experts begin;
    gradients when they are complete. Layers without replicas delay nothing. Resident slots are filled and emptied once
    a step; shared ones, two for all layers, for each pass: layers 2 and 4 cannot be in slots at the same time."""
    used, mode, stages = case.split()
    assert pool.run(2, _follow, [*map(int, used)], mode == "shared", int(stages)) == [STARTS[case]] * 2


def _come_home(layers):
    """Run three micro-batches. Returns the layers whose gradients are home: after each pass ends, and at the end."""
    slots, placements, homes, _ = _slots([*range(layers)], False, layers)
    slots.begin_step(placements, 3)
    home = []

    def look():
        home.append([layer for layer in range(layers) if homes[layer][0][0].main_grad.any()])

    for _ in range(3):
        for layer in range(layers):
            slots.acquire(layer, forward=True)
        for layer in reversed(range(layers)):
            slots.acquire(layer, forward=False)
            ((weight,),) = slots.leaves(layer)
            weight.sum().backward()
            slots.accumulate_gradients(layer)
            slots.end_pass(layer)
            look()
    slots.end_step()
    look()
    return home


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_gradients_are_waited_for_two_layers_later(pool, layers):
    """And with one or two layers at the end of the iteration, not where the same layer has passed before."""
    none, two_later = [[]] * (3 * layers - 1), [*range(2, layers)]
    assert pool.run(2, _come_home, layers) == [[*none, two_later, [*range(layers)]]] * 2


CHAIN, PIECES = 4, 3
TURNS = CHAIN - 1 + PIECES - 1


def _post(connections, boundaries):
    """On one of four ranks, on a device with streams: two layers whose expert of rank 0 has replicas on all others.

    Returns the messages that this rank posts at each call: at the start, at each boundary and while it waits, for the
    weights of layer 0, and then for its gradients.
    """
    import os

    import torch
    import torch.distributed as dist

    from balancing.experts.engine import relay
    from balancing.experts.engine.slots import HomeExperts, ReplicaSlots
    from balancing.experts.placement import ReplicaPlacement
    from tests.support.checkers.noted_device import install
    from tests.support.checkers.stream_races import watch_streams

    log = install()
    races = watch_streams(log)
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = connections
    dist.init_process_group("gloo")
    dist.all_reduce(torch.zeros(1))
    relay._PIECE_BYTES = SIZE * 4 // PIECES
    rank = dist.get_rank()
    weight, total = torch.full((SIZE,), 1.0 + rank, requires_grad=True), torch.zeros(SIZE)
    slots = ReplicaSlots(
        HomeExperts([[[weight]]], gradient=lambda weight: total),
        1,
        dist.group.WORLD,
        shared=False,
    )
    placement = ReplicaPlacement(np.arange(CHAIN), [[-1], [0], [0], [0]])
    posted = []

    def note(call, *args, **kwargs):
        before = len(log.operations)
        call(*args, **kwargs)
        posted[-1].append(sum(len(each.messages) for each in log.operations[before:]))

    posted.append([])
    note(slots.begin_step, [placement], 1)
    for _ in range(boundaries):
        note(slots.advance)
    note(slots.acquire, 0, forward=True)
    ((leaf,),) = slots.leaves(0)
    assert rank == 0 or (leaf == 1).all()
    leaf.grad = torch.full((SIZE,), float(rank))
    posted.append([])
    note(slots.accumulate_gradients, 0)
    for _ in range(boundaries):
        note(slots.advance)
    slots.end_pass(0)
    note(slots.end_step)
    assert (total == (1 + 2 + 3 if rank == 0 else 0)).all()
    assert not races.found
    return posted


def _turns(place):
    """The messages of each turn: piece n leaves the rank at `place` of the chain in turn place + n."""
    sent = [place < CHAIN - 1 and 0 <= turn - place < PIECES for turn in range(TURNS)]
    received = [place > 0 and 0 <= turn - (place - 1) < PIECES for turn in range(TURNS)]
    return [a + b for a, b in zip(sent, received, strict=True)]


@pytest.mark.parametrize(
    ("connections", "boundaries", "first", "between", "rest"),
    [("8", 2, TURNS, 0, 0), ("1", 2, 1, 2, TURNS - 3), ("1", TURNS + 2, 1, TURNS - 1, 0), ("1", 0, 1, 0, TURNS - 1)],
    ids=["a queue for each stream", "one queue", "more boundaries than turns", "no boundary"],
)
def test_one_turn_is_posted_at_a_boundary(pool, connections, boundaries, first, between, rest):
    """With one queue, no kernel waits behind more than one turn until the transfer itself is waited for."""
    ranks = pool.run(CHAIN, _post, connections, boundaries)
    for transfer, order in ((0, range(CHAIN)), (1, range(CHAIN)[::-1])):
        for place, rank in enumerate(order):
            turns = _turns(place)
            singly = [[each] for each in turns[first : first + between]]
            expected = [turns[:first], *singly, *[[]] * (boundaries - between), turns[TURNS - rest :]]
            assert ranks[rank][transfer] == [sum(each) for each in expected], (transfer, rank)


SHARE = {"experts": 0.6, "between": 0.4}  # parts of the compute of a layer


def _post_in_parts():
    """On one of four ranks, on a device with streams: two layers whose expert of rank 0 has replicas on all others.

    Returns the messages that this rank posts at each call, by name, and how many turns may begin before the exchange of
    tokens that was started before the call has ended.
    """
    import os

    import torch
    import torch.distributed as dist

    from balancing.experts.engine import relay
    from balancing.experts.engine.slots import HomeExperts, ReplicaSlots
    from balancing.experts.placement import ReplicaPlacement
    from tests.support.checkers.noted_device import install
    from tests.support.checkers.stream_races import watch_streams

    log = install()
    races = watch_streams(log)
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "8"
    dist.init_process_group("gloo")
    dist.all_reduce(torch.zeros(1))
    exchange = dist.new_group()
    relay._PIECE_BYTES = SIZE * 4 // PIECES
    rank = dist.get_rank()
    homes = [[[torch.full((SIZE,), 1.0 + rank + layer, requires_grad=True)]] for layer in range(2)]
    sums = {id(layer[0][0]): torch.zeros(SIZE) for layer in homes}
    slots = ReplicaSlots(
        HomeExperts(homes, gradient=lambda weight: sums[id(weight)]),
        1,
        dist.group.WORLD,
        shared=False,
        expert_share=SHARE["experts"],
    )
    placement = ReplicaPlacement(np.arange(CHAIN), [[-1], [0], [0], [0]])
    posted, early = [], 0

    def note(name, call, *args, **kwargs):
        nonlocal early
        dist.all_reduce(torch.zeros(1), group=exchange)
        before, exchanged = len(log.operations), log.operations[-1]
        call(*args, **kwargs)
        new = [each for each in log.operations[before:] if each.messages]
        early += sum(each.after.get(exchanged.comm, 0) < exchanged.number for each in new)
        posted.append((name, sum(len(each.messages) for each in new)))

    note("step", slots.begin_step, [placement] * 2, 1)
    for layer in range(2):
        note("experts", slots.acquire, layer, forward=True)
        note("between", slots.begin_compute)
    for layer in (1, 0):
        note("experts", slots.acquire, layer, forward=False)
        ((leaf,),) = slots.leaves(layer)
        assert rank == 0 or (leaf == 1 + layer).all()
        leaf.grad = torch.full((SIZE,), float(rank))
        note("gradients", slots.accumulate_gradients, layer)
        slots.end_pass(layer)
        note("between", slots.begin_compute)
    note("step", slots.end_step)
    for layer in homes:
        assert (sums[id(layer[0][0])] == (1 + 2 + 3 if rank == 0 else 0)).all()
    assert not races.found
    return posted, early


def test_transfers_leave_the_links_to_exchanges_of_tokens(pool):
    """A transfer is posted when experts begin to compute and when what is between layers does, in proportion. The first
    layer's gradients are posted at once."""
    parts = [  # what is posted: of which transfer, which part
        ("step", "weights", 0, 1),
        ("experts", "weights", 0, 0.6),
        ("between", "weights", 0.6, 1),
        ("experts", "weights", 0, 0),
        ("between", "weights", 0, 0),
        ("experts", "gradients", 0, 0),
        ("gradients", "gradients", 0, 0),
        ("between", "gradients", 0, 0.4),
        ("experts", "gradients", 0.4, 1),
        ("gradients", "gradients", 0, 1),  # no experts come after the first layer's
        ("between", "gradients", 0, 0),
        ("step", "gradients", 0, 0),
    ]
    for rank, (posted, early) in enumerate(pool.run(CHAIN, _post_in_parts)):
        of_first = sum(_turns(CHAIN - 1 - rank))
        assert early <= of_first, "a turn begins when the exchange before has ended"
        for (name, messages), (expected, kind, begin, end) in zip(posted, parts, strict=True):
            assert name == expected
            turns = _turns(CHAIN - 1 - rank if kind == "gradients" else rank)
            assert messages == sum(turns[round(begin * TURNS) : round(end * TURNS)]), (name, kind)


def _delay(length, shares, experts, between, exchange):
    """By how much a transfer delays what follows two stretches of compute with an exchange after each, in seconds.

    Exchange and transfer halve the link's speed for each other. What was not sent by the end is waited for.
    """
    delay = left = 0.0
    for share, compute in zip(shares, (experts, between), strict=True):
        left = max(0.0, left + share * length - compute)
        shared = min(left, exchange)
        delay, left = delay + shared, left - shared
    return delay + left


def test_no_other_parts_delay_less():
    """Over lengths of transfers, compute and exchanges: whole, and a grid of other parts."""
    draw = np.random.default_rng(0)
    for _ in range(200):
        experts, between, exchange = draw.uniform(0.05, 1, 3)
        length = draw.uniform(0.01, 4)
        stretches = experts + between
        delay = _delay(length, (experts / stretches, between / stretches), experts, between, exchange)
        others = np.linspace(0, 1, 21)
        assert delay <= min(_delay(length, (first, 1 - first), experts, between, exchange) for first in others) + 1e-9
        assert delay == pytest.approx(max(0.0, length - stretches))


def test_numbers_of_messages_fit_torchs_32_bits():
    """Of a thousand layers with a thousand experts each."""
    last = Numbers(layer=1023, homeward=True, experts=1024).first(1023)
    assert 0 < last + 511 < 2**31
    assert (
        Numbers(layer=1, homeward=False, experts=4).first(2) - Numbers(layer=1, homeward=False, experts=4).first(1)
        == 512
    )

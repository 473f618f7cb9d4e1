"""The simulated schedule of an iteration: transfers arrive in time and overlap compute that is long enough."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from balancing.experts import BlockSeconds, exposed_seconds, render_schedule, simulate_iteration
from balancing.layers import operations

quick = settings(max_examples=80)
COMPUTE = ("FNEC", "A2A", "FEC", "BEC", "BNEC")
seconds = st.floats(0.0, 4.0)


@st.composite
def schedules(draw):
    """Any iteration: plain, along a pipeline, or interleaved. Returns (schedule, blocks, mode)."""
    block = st.builds(BlockSeconds, st.floats(0.1, 3), st.floats(0.1, 3), seconds, seconds, seconds)
    blocks = [*draw(st.lists(block, max_size=5)), BlockSeconds(1.0, 2.0, 0.5, 1.0)]
    mode, micro_batches = draw(st.sampled_from(["resident", "shared"])), draw(st.integers(1, 4))
    options = {}
    kind = draw(st.sampled_from(["plain", "pipeline", "interleaved"]))
    if kind == "pipeline":
        ranks = draw(st.integers(2, 4))
        options["passes"] = operations(ranks, micro_batches)[draw(st.integers(0, ranks - 1))]
    elif kind == "interleaved":
        options["passes"] = operations(3, 3 * micro_batches, chunks=2)[draw(st.integers(0, 2))]
        options["chunks"] = [range(len(blocks) // 2), range(len(blocks) // 2, len(blocks))]
    options["overlap"] = draw(st.booleans())
    return simulate_iteration(blocks, mode=mode, micro_batches=micro_batches, **options), blocks, mode


def ends(schedule):
    """Index of the entry with which each operation ends; a transfer ends with the compute that hides it."""
    return [at if step.under is None else step.under for at, step in enumerate(schedule)]


@quick
@given(schedules())
def test_weights_are_there_before_they_are_used(case):
    schedule, blocks, mode = case
    assert schedule[0].kind == schedule[-1].kind == "Step", "weights are final before the first transfer"
    complete = ends(schedule)
    holds = {}  # buffer -> (block, the part that has come, complete at)
    uses = 0
    for at, step in enumerate(schedule):
        buffer = step.block if mode == "resident" else step.buffer
        if step.kind == "Trans":
            assert step.under is None or step.under > at
            block, part, _ = holds.get(buffer, (None, 0.0, 0))
            if block != step.block or part == 1.0:
                part = 0.0
            assert step.start == pytest.approx(part), "parts follow each other without gap"
            holds[buffer] = (step.block, step.stop, complete[at])
        elif step.kind in ("FEC", "BEC"):
            uses += 1
            in_place = [done for block, part, done in holds.values() if block == step.block and part == 1.0]
            # A block whose transfers take no time has none.
            assert blocks[step.block].trans == 0 or (in_place and max(in_place) < at)
    assert uses > 0


@quick
@given(schedules())
def test_a_buffer_in_use_is_not_written(case):
    """At most two buffers a chunk; while a block uses one, the other is filled."""
    schedule, _, mode = case
    if mode == "resident":
        assert all(step.buffer is None for step in schedule)
        return
    assert {step.buffer for step in schedule if step.kind == "Trans"} <= {0, 1, 2, 3}
    holds = {}
    for step in schedule:
        if step.kind == "Trans":
            if step.under is not None and schedule[step.under].kind in ("FEC", "BEC"):
                used = schedule[step.under].block
                assert used not in (step.block, holds.get(step.buffer))
            holds[step.buffer] = step.block


@quick
@given(schedules())
def test_gradients_come_home_after_the_backward_and_before_the_reduction(case):
    schedule, blocks, mode = case
    complete = ends(schedule)
    for block, cost in enumerate(blocks):
        backward = [at for at, step in enumerate(schedule) if step.kind == "BEC" and step.block == block]
        home = [at for at, step in enumerate(schedule) if step.kind == "Agg" and step.block == block]
        reduce = [at for at, step in enumerate(schedule) if step.kind == "Reduce" and step.block == block]
        assert len(reduce) == 1
        assert max(backward) < reduce[0]
        assert all(complete[at] < reduce[0] for at in home)
        sent = sum(schedule[at].stop - schedule[at].start for at in home)
        times = len(backward) if mode == "shared" else 1
        assert sent == pytest.approx(times if cost.agg > 0 else 0)
        if mode == "resident":
            assert not home or min(home) > max(backward)
        else:
            for at in home:
                source = [b for b in backward if schedule[b].micro_batch == schedule[at].micro_batch]
                assert source[0] < at


@quick
@given(schedules())
def test_parts_fit_the_compute_they_hide_under(case):
    schedule, blocks, _ = case
    for at, step in enumerate(schedule):
        if step.kind in COMPUTE:
            under = [other.seconds for other in schedule if other.under == at]
            assert sum(under) <= step.seconds + 1e-9
            if step.kind == "A2A":
                assert all(other.kind == "Plan" for other in schedule if other.under == at)
    for step in schedule:
        if step.kind in ("Trans", "Agg"):
            whole = blocks[step.block].trans if step.kind == "Trans" else blocks[step.block].agg
            assert step.seconds == pytest.approx((step.stop - step.start) * whole)
            assert step.seconds > 0


@quick
@given(schedules())
def test_every_block_runs_in_order_and_is_planned_once(case):
    schedule, blocks, _ = case
    plans = [step.block for step in schedule if step.kind == "Plan"]
    assert sorted(plans) == list(range(len(blocks)))
    forward = [(step.micro_batch, step.block) for step in schedule if step.kind == "FEC"]
    backward = [(step.micro_batch, step.block) for step in schedule if step.kind == "BEC"]
    assert sorted(forward) == sorted(backward) and len(set(forward)) == len(forward)
    order = [(step.micro_batch, step.block, step.kind) for step in schedule if step.kind in ("FEC", "BEC")]
    for micro_batch, block in forward:
        assert order.index((micro_batch, block, "FEC")) < order.index((micro_batch, block, "BEC"))


def test_resident_slots_are_filled_once_however_many_micro_batches():
    blocks = [BlockSeconds(1.0, 2.0, 0.5, 1.0)] * 3
    for mode, times in (("resident", 1), ("shared", 4)):
        schedule = simulate_iteration(blocks, mode=mode, micro_batches=4)
        agg = sum(step.stop - step.start for step in schedule if step.kind == "Agg")
        assert agg == pytest.approx(3 * times)
    resident = simulate_iteration(blocks, mode="resident", micro_batches=4)
    assert sum(step.stop - step.start for step in resident if step.kind == "Trans") == pytest.approx(3)


def test_the_turn_needs_no_transfer():
    """Backward begins with the layer that forward ended with, and the other buffer has the one before."""
    schedule = simulate_iteration([BlockSeconds(1.0, 2.0, 0.5, 1.0)] * 4, mode="shared")
    sent = [step.block for step in schedule if step.kind == "Trans"]
    assert sent == [0, 1, 2, 3, 1, 0]


def test_weights_set_out_when_the_experts_before_begin():
    schedule = simulate_iteration([BlockSeconds(1.0, 2.0, 2.5, 1.0)] * 3, mode="resident")
    parts = [
        (step.block, round(step.seconds, 9), None if step.under is None else schedule[step.under].kind)
        for step in schedule
        if step.kind == "Trans"
    ]
    assert parts == [
        (0, 1.0, "FNEC"),
        (0, 1.5, None),
        (1, 2.0, "FEC"),
        (1, 0.5, "FNEC"),
        (2, 2.0, "FEC"),
        (2, 0.5, "FNEC"),
    ]


def test_gradients_have_the_time_of_two_layers_where_slots_are_resident():
    """10 s: 2 under BNEC 2, 4 and 2 under block 1, and with resident slots 2 more under BEC 0."""
    blocks = [BlockSeconds(1.0, 2.0, 1.0, agg) for agg in (0.0, 1e-9, 10.0)]
    for mode, places in (
        ("resident", [("BNEC", 2), ("BEC", 1), ("BNEC", 1), ("BEC", 0)]),
        ("shared", [("BNEC", 2), ("BEC", 1), None]),
    ):
        schedule = simulate_iteration(blocks, mode=mode)
        home = [step.under for step in schedule if step.kind == "Agg" and step.block == 2]
        found = [None if at is None else (schedule[at].kind, schedule[at].block) for at in home]
        assert found == places


def test_what_does_not_fit_uses_the_blocks_own_attention():
    """5 s of weights, on their way since the step began: 3 under block 0, which has no replicas, 1 under FNEC 1 before
    its experts need them, 1 exposed."""
    schedule = simulate_iteration([BlockSeconds(1.0, 2.0, 0.0, 0.0), BlockSeconds(1.0, 2.0, 5.0, 0.0)], mode="resident")
    trans = [step for step in schedule if step.kind == "Trans"]
    assert [step.seconds for step in trans] == pytest.approx([1, 2, 1, 1])
    places = [None if step.under is None else (schedule[step.under].kind, schedule[step.under].block) for step in trans]
    assert places == [("FNEC", 0), ("FEC", 0), ("FNEC", 1), None]
    assert exposed_seconds(schedule) == pytest.approx(1.0)


def test_exposed_is_everything_without_overlap():
    blocks = [BlockSeconds(1.0, 2.0, 0.5, 3.0)] * 3
    alone = simulate_iteration(blocks, mode="resident", micro_batches=2, overlap=False)
    assert exposed_seconds(alone) == pytest.approx(3 * (0.5 + 3.0))
    hidden = simulate_iteration(blocks, mode="resident", micro_batches=2)
    # Of the first block's gradients, which come last, 2 s are under its attention and nothing comes after that.
    assert exposed_seconds(hidden) == pytest.approx(1.0)


def test_the_text_shows_what_runs_under_what():
    text = render_schedule(simulate_iteration([BlockSeconds(1e-3, 2e-3, 1.5e-3, 1e-3)] * 2, mode="shared"))
    lines = text.splitlines()
    assert lines[1] == "Step" and lines[-1] == "Step"
    assert any(line.startswith("FEC 0 mb 0") and "Trans 1 mb 0 into buffer 1 (1.500 ms)" in line for line in lines)
    assert any(line.startswith("A2A 1 mb 0") and "Plan 1 of the next iteration" in line for line in lines)
    assert all(earlier != later or "A2A" in earlier for earlier, later in pairwise(lines))


@pytest.mark.parametrize(
    ("blocks", "options", "named"),
    [
        (0, {"mode": "shared"}, "0 blocks"),
        (1, {"mode": "both"}, "mode='both'"),
        (1, {"mode": "shared", "micro_batches": 0}, "0 micro-batches"),
        (1, {"mode": "shared", "passes": [("sideways", 0, 0)]}, "sideways"),
        (1, {"mode": "shared", "passes": [("forward", 1, 0)]}, "of 1 chunks"),
    ],
)
def test_bad_input(blocks, options, named):
    with pytest.raises(ValueError, match=named):
        simulate_iteration([BlockSeconds(1.0, 1.0, 1.0, 1.0)] * blocks, **options)

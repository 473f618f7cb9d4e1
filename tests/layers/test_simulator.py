"""Simulated pipeline schedules: comparison with closed formulas, with each other, and with megatron-core's own."""

from collections import Counter, defaultdict
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from balancing.pipeline import MEGATRON_DEFAULTS, Operation, Schedule, operations, simulate_schedule
from balancing.pipeline.schedule import program

quick = settings(max_examples=60)


def busy(result):
    """Seconds of compute of each rank."""
    return (result.end - result.start).sum(axis=1)


def bubble(result):
    """Idle part of the time of all ranks."""
    return 1 - busy(result).mean() / result.step_time


@st.composite
def pipelines(draw, most_ranks=6):
    """A pipeline of any shape that Megatron accepts: (forward, backward, micro_batches, simulation's options)."""
    ranks = draw(st.integers(1, most_ranks))
    chunks = draw(st.integers(1, 3)) if ranks > 1 else 1
    schedule = MEGATRON_DEFAULTS
    if chunks == 1:
        micro_batches = draw(st.integers(1, 9))
    else:
        overlap = draw(st.booleans()) if ranks > 2 else True
        schedule = Schedule(draw(st.integers(ranks, ranks + 2)), overlap, draw(st.booleans()))
        micro_batches = schedule.group * draw(st.integers(1, 3))
    options = {"schedule": schedule}
    generator = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    shape = (ranks, chunks, micro_batches)
    options["transfer"] = generator.uniform(0, 1, ranks) if draw(st.booleans()) else 0.0
    return generator.uniform(0.1, 3, shape), generator.uniform(0.1, 3, shape), micro_batches, options


@quick
@given(st.integers(1, 10), st.integers(1, 14), st.floats(0.01, 5), st.floats(0.01, 5))
def test_equal_stages_take_the_textbook_time(ranks, micro_batches, forward, backward):
    result = simulate_schedule(np.full(ranks, forward), np.full(ranks, backward), micro_batches)
    assert result.step_time == pytest.approx((micro_batches + ranks - 1) * (forward + backward))
    assert bubble(result) == pytest.approx((ranks - 1) / (micro_batches + ranks - 1), abs=1e-12)


@quick
@given(st.integers(2, 6), st.integers(1, 4), st.integers(2, 4), st.floats(0.01, 5), st.floats(0.01, 5))
def test_interleaving_divides_the_bubble_by_the_chunks(ranks, rounds, chunks, forward, backward):
    shape, micro_batches = (ranks, chunks), rounds * ranks
    result = simulate_schedule(np.full(shape, forward), np.full(shape, backward), micro_batches)
    assert result.step_time == pytest.approx((micro_batches * chunks + ranks - 1) * (forward + backward))


def test_transfers_by_hand():
    """Two ranks, two micro-batches: nine units of compute on the longest path, and three messages between them."""
    result = simulate_schedule([1.0, 1.0], [2.0, 2.0], 2, transfer=0.5)
    assert result.step_time == pytest.approx(9 + 3 * 0.5)
    assert result.start[0].tolist() == pytest.approx([0, 1.5, 5, 8.5])  # F0, F1, B0, B1
    assert result.start[1].tolist() == pytest.approx([1.5, 2.5, 5, 6])  # F0, B0, F1, B1


def test_a_late_receiver_holds_up_the_sender():
    """Rank 0 hands over its second output only when rank 1 has done the first and asks for it: its third is late."""
    result = simulate_schedule([1.0, 5.0, 1.0], [1.0, 1.0, 1.0], 4)
    third = result.operations[0].index(Operation("forward", 0, 2))
    assert result.start[0][third] == pytest.approx(1 + 5)


@quick
@given(st.integers(1, 8), st.integers(1, 12), st.integers(0, 2**32 - 1))
def test_the_busiest_stage_sets_the_pace(ranks, micro_batches, seed):
    """A stage begins when the first micro-batch comes, and when it is done its last gradient has to go home."""
    forward, backward = np.random.default_rng(seed).uniform(0.1, 3, (2, ranks))
    result = simulate_schedule(forward, backward, micro_batches)
    passage = np.cumsum(forward + backward) - (forward + backward)
    assert result.step_time >= (passage + busy(result)).max() - 1e-9
    assert result.step_time <= (micro_batches + ranks - 1) * (forward.max() + backward.max()) + 1e-9


def test_one_slow_stage_of_eight():
    slow = np.ones(8)
    slow[3] = 2
    result = simulate_schedule(slow, 2 * slow, 32)
    assert int(busy(result).argmax()) == 3
    assert result.step_time == pytest.approx(3 + 32 * 6 + 6, rel=0.03)  # arrive, work, drain, and few waits of its own


@quick
@given(pipelines())
def test_every_micro_batch_passes_every_stage_once(pipeline):
    forward, _, micro_batches, options = pipeline
    ranks, chunks = forward.shape[:2]
    expected = {
        Operation(kind, chunk, batch)
        for kind in ("forward", "backward")
        for chunk in range(chunks)
        for batch in range(micro_batches)
    }
    for of_rank in operations(ranks, micro_batches, chunks=chunks, schedule=options["schedule"]):
        assert len(of_rank) == len(expected) and set(of_rank) == expected


@quick
@given(pipelines())
def test_nothing_starts_before_what_it_needs(pipeline):
    forward, backward, micro_batches, options = pipeline
    ranks, chunks = forward.shape[:2]
    links = np.broadcast_to(options["transfer"], ranks)
    result = simulate_schedule(forward, backward, micro_batches, **options)
    end, start = {}, {}
    for rank, of_rank in enumerate(result.operations):
        for (kind, chunk, batch), begin, stop in zip(of_rank, result.start[rank], result.end[rank], strict=True):
            key = (kind, chunk * ranks + rank, batch)
            start[key], end[key] = begin, stop
            seconds = {"forward": forward, "backward": backward}[kind][rank, chunk, batch]
            assert stop - begin == pytest.approx(seconds)
    last = ranks * chunks - 1
    for (kind, stage, batch), begin in start.items():
        if kind == "forward" and stage > 0:
            assert begin >= end["forward", stage - 1, batch] + links[(stage - 1) % ranks] - 1e-9
        elif kind == "backward" and stage < last:
            assert begin >= end["backward", stage + 1, batch] + links[stage % ranks] - 1e-9
        elif kind == "backward":
            assert begin >= end["forward", last, batch] - 1e-9
    assert (result.start[:, 1:] >= result.end[:, :-1] - 1e-9).all()  # one operation at a time


@quick
@given(pipelines())
def test_time_is_conserved(pipeline):
    forward, backward, micro_batches, options = pipeline
    result = simulate_schedule(forward, backward, micro_batches, **options)
    assert busy(result) == pytest.approx((forward + backward).sum(axis=(1, 2)))
    assert busy(result).max() <= result.step_time * (1 + 1e-12)


@quick
@given(pipelines(), st.integers(0, 2**32 - 1))
def test_more_work_never_ends_earlier(pipeline, seed):
    forward, backward, micro_batches, options = pipeline
    before = simulate_schedule(forward, backward, micro_batches, **options)
    generator = np.random.default_rng(seed)
    slower = forward.copy()
    slower[tuple(generator.integers(size) for size in slower.shape)] += generator.uniform(0, 5)
    after = simulate_schedule(slower, backward, micro_batches, **options)
    assert after.step_time >= before.step_time - 1e-9
    assert (after.end >= before.end - 1e-9).all()
    longer = simulate_schedule(forward, backward, micro_batches, **(options | {"transfer": options["transfer"] + 0.3}))
    assert longer.step_time >= before.step_time - 1e-9


@quick
@given(pipelines())
def test_seconds_of_another_size_change_only_the_scale(pipeline):
    forward, backward, micro_batches, options = pipeline
    once = simulate_schedule(forward, backward, micro_batches, **options)
    thrice = simulate_schedule(
        3 * forward, 3 * backward, micro_batches, **(options | {"transfer": 3 * options["transfer"]})
    )
    assert thrice.step_time == pytest.approx(3 * once.step_time)


def test_shapes_of_seconds_agree():
    stage = np.array([1.0, 2.0, 3.0])
    plain = simulate_schedule(stage, 2 * stage, 5)
    each = np.repeat(stage[:, None, None], 5, axis=2)
    for forward, backward in ((stage[:, None], 2 * stage), (each, 2 * stage), (each, 2 * each)):
        assert simulate_schedule(forward, backward, 5).step_time == plain.step_time


def test_one_rank_never_waits():
    result = simulate_schedule([1.0], [2.0], 3)
    assert (result.step_time, bubble(result)) == (9.0, 0.0)
    assert [operation.kind for operation in result.operations[0]] == ["forward", "backward"] * 3


@pytest.mark.parametrize(
    ("forward", "backward", "micro_batches", "options", "message"),
    [
        ([1.0, -1.0], [1.0, 1.0], 4, {}, "forward has -1.0"),
        ([1.0, 1.0], [1.0, float("nan")], 4, {}, "backward has nan"),
        ([1.0, 1.0], [1.0], 4, {}, r"backward has shape \(1,\)"),
        (1.0, 1.0, 4, {}, "forward has shape"),
        ([1.0, 1.0], [1.0, 1.0], 0, {}, "micro_batches is 0"),
        ([1.0, 1.0], [1.0, 1.0], 4, {"schedule": Schedule(overlap=True)}, "overlap=True needs chunks"),
        ([1.0, 1.0], [1.0, 1.0], 4, {"transfer": -0.1}, "transfer is -0.1"),
        ([1.0, 1.0], [1.0, 1.0], 4, {"transfer": [0.1] * 3}, r"transfer has shape \(3,\)"),
        (np.ones((4, 2)), np.ones((4, 2)), 3, {}, "groups of 4"),
        (np.ones((4, 2)), np.ones((4, 2)), 6, {}, "last group of 2"),
        (np.ones((4, 2)), np.ones((4, 2)), 8, {"schedule": Schedule(group=3)}, "groups of 3"),
        (np.ones((2, 2)), np.ones((2, 2)), 4, {"schedule": Schedule(overlap=False)}, "without overlap"),
        (np.ones((1, 2)), np.ones((1, 2)), 4, {}, "at least 2 pipeline ranks"),
        (np.ones((4, 2)), np.ones(4), 4, {}, r"backward has shape \(4,\)"),
    ],
)
def test_bad_input_is_named(forward, backward, micro_batches, options, message):
    with pytest.raises(ValueError, match=message):
        simulate_schedule(forward, backward, micro_batches, **options)


# What Megatron really does: its own schedule runs here, one rank at a time, with a communicator that only takes notes.

SHAPES = [  # ranks, chunks, micro-batches, group, overlap
    (1, 1, 3, None, False),
    (2, 1, 1, None, False),
    (2, 1, 5, None, False),
    (4, 1, 2, None, False),
    (4, 1, 4, None, False),
    (5, 1, 11, None, False),
    (2, 2, 2, None, True),
    (2, 3, 6, None, True),
    (4, 2, 4, None, True),
    (4, 2, 12, None, True),
    (4, 3, 8, None, True),
    (4, 2, 10, 5, True),
    (3, 2, 10, 7, True),
    (3, 2, 3, None, False),
    (4, 2, 12, None, False),
    (4, 3, 8, None, False),
    (4, 2, 10, 5, False),
]
IN_PARTS = [
    (2, 2, 2, None, True),
    (2, 3, 6, None, True),
    (4, 2, 12, None, True),
    (3, 2, 10, 7, True),
    (4, 3, 8, None, False),
]
NAMES = {("send", "forward"): "send_next", ("send", "backward"): "send_prev"}
NAMES |= {("receive", "forward"): "recv_prev", ("receive", "backward"): "recv_next"}


def everything_noted() -> list[list[list[list]]]:
    """What Megatron makes each rank of each of SHAPES do, then of each of IN_PARTS with layers in parts."""
    import megatron.core.pipeline_parallel.combined_1f1b as combined
    import megatron.core.pipeline_parallel.p2p_communication as communication
    import megatron.core.pipeline_parallel.utils as utils
    from megatron.core.pipeline_parallel import get_forward_backward_func

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(utils, "get_pg_rank", lambda group: group.rank())
        patch.setattr(utils, "get_pg_size", lambda group: group.size())
        patch.setattr(combined, "set_streams", lambda **options: None)
        patch.setattr(combined, "combined_forward_backward_step", both_passes)
        megatron = SimpleNamespace(schedule=get_forward_backward_func, communicator=communication.P2PCommunicator)
        return [
            [[noted_by_megatron(megatron, rank, *shape, in_parts) for rank in range(shape[0])] for shape in shapes]
            for in_parts, shapes in enumerate((SHAPES, IN_PARTS))
        ]


@pytest.fixture(scope="module")
def noted(pool):
    """Megatron.core's schedules on a CPU, with ranks as arguments, in a separate process."""
    noted = zip((SHAPES, IN_PARTS), pool.run(1, everything_noted)[0], strict=True)
    return [dict(zip(shapes, notes, strict=True)) for shapes, notes in noted]


def both_passes(
    step, data, forward_model, count, given, results, backward_model, received, output, gradient, config, *,
    f_model_chunk_id, pre_forward, pre_backward, post_forward, post_backward, current_microbatch, **rest,
):  # fmt: skip
    """In the place of Megatron's combined step: whole passes, with its messages before and after both of them."""
    import torch
    from megatron.core.pipeline_parallel.schedules import backward_step, forward_step

    for callback in (forward_model and pre_forward, backward_model and pre_backward):
        if callback:
            callback()
    sent = tokens = returned = None
    if forward_model:
        sent, tokens = forward_step(step, data, forward_model, count, given, results, config, 1)
    if backward_model:
        returned = backward_step(received, output, gradient, config)
    if forward_model and post_forward:
        post_forward(sent)
    if backward_model and post_backward:
        post_backward(returned)
    return sent, torch.zeros([], dtype=torch.int) if tokens is None else tokens, returned


def noted_by_megatron(megatron, rank, ranks, chunks, micro_batches, group, overlap, in_parts):
    """What upstream's schedule computes, posts and waits for on one rank, in order."""
    import torch
    from megatron.core.process_groups_config import ProcessGroupCollection

    from benchmarks.emulated.paced import schedule_arguments

    notes = []
    counts = Counter()

    class Notes(megatron.communicator):
        def __init__(self, config):
            self.config, self.virtual_pipeline_model_parallel_size = config, chunks if chunks > 1 else None
            self.pp_group = SimpleNamespace(rank=lambda: rank, size=lambda: ranks)

        def _communicate(
            self, *, tensor_send_next, tensor_send_prev, recv_prev, recv_next, tensor_shape, wait_on_reqs=True
        ):
            posted = {"send_next": tensor_send_next is not None, "send_prev": tensor_send_prev is not None}
            posted |= {"recv_prev": recv_prev, "recv_next": recv_next}
            numbered = {}
            for name in [name for name, wanted in posted.items() if wanted]:
                numbered[name] = (name, counts[name])
                counts[name] += 1
            if numbered:
                notes.append(("post", frozenset(numbered.values())))
                if wait_on_reqs:
                    notes.append(("wait", frozenset(numbered.values())))
            handles = {
                name: SimpleNamespace(wait=lambda message=message: notes.append(("wait", frozenset([message]))))
                for name, message in numbered.items()
            }
            tensors = [
                torch.ones(tensor_shape, requires_grad=True) if want else None for want in (recv_prev, recv_next)
            ]
            return *tensors, None if wait_on_reqs else handles

    class Log(list):
        def append(self, entry):
            notes.append(("compute", Operation(*entry[:3])))

    nothing = np.zeros((ranks, chunks))
    arguments = schedule_arguments(nothing, nothing, rank, micro_batches, overlap, log=Log())
    config = arguments["model"][0].config
    config.overlap_moe_expert_parallel_comm = bool(in_parts)
    if group is not None:
        config.microbatch_group_size_per_vp_stage = group
    groups = ProcessGroupCollection()
    groups.tp = groups.cp = SimpleNamespace(rank=lambda: 0, size=lambda: 1)
    schedule = megatron.schedule(ranks, chunks if chunks > 1 else None)
    schedule(**arguments, p2p_communicator=Notes(config), pg_collection=groups)
    return notes


BOTH = [pytest.param(shape, False, id="-".join(map(str, shape))) for shape in SHAPES]
BOTH += [pytest.param(shape, True, id="-".join(map(str, shape)) + "-in-parts") for shape in IN_PARTS]


@pytest.mark.parametrize("shape, in_parts", BOTH)
def test_each_rank_does_what_megatron_makes_it_do(noted, shape, in_parts):
    ranks, chunks, micro_batches, group, overlap = shape
    schedule = Schedule(group, overlap, in_parts)
    for rank in range(ranks):
        notes, counts, number = [], Counter(), {}
        for step in program(rank, ranks, micro_batches, chunks=chunks, schedule=schedule):
            if step.compute:
                notes.append(("compute", step.compute))
            posted = []
            for side, messages in (("send", step.send), ("receive", step.receive)):
                for message in messages:
                    name = NAMES[side, message.kind]
                    number[message] = (name, counts[name])
                    counts[name] += 1
                    posted.append(number[message])
            if posted:
                notes.append(("post", frozenset(posted)))
            if step.wait:
                notes.append(("wait", frozenset(number[message] for message in step.wait)))
        assert notes == noted[in_parts][shape][rank]


@pytest.mark.parametrize("shape, in_parts", BOTH)
def test_messages_arrive_in_the_order_in_which_they_leave(shape, in_parts):
    """Point-to-point messages have no name: the n-th receive from a rank gets the n-th send to it."""
    ranks, chunks, micro_batches, group, overlap = shape
    schedule = Schedule(group, overlap, in_parts)
    sent, received = defaultdict(list), defaultdict(list)
    for rank in range(ranks):
        for step in program(rank, ranks, micro_batches, chunks=chunks, schedule=schedule):
            for message in step.send:
                towards = rank + 1 if message.kind == "forward" else rank - 1
                sent[rank, towards % ranks, message.kind].append(message)
            for message in step.receive:
                received[message.source, rank, message.kind].append(message)
    assert sent == received

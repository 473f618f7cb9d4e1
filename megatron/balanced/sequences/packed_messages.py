"""Sizes of pipeline messages for micro-batches of several samples that are packed into one sequence.

Megatron-LM flattens such a micro-batch to [1, samples x tokens] before the first layer, but its schedules still expect
messages of [tokens, samples, hidden] between stages. Here they get the size of the flattened batch.

If documents are distributed over micro-batches (`--sequence-micro-batches`), micro-batches differ in rows.
Megatron-LM's stages would then send each other the shape of every message first, and wait for it. Here every stage
knows the micro-batches of the step and the order of messages in the schedule, so it knows the shapes. They are in the
model's config, which Megatron-LM's communicator has.
"""

import functools
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from megatron.core import mpu

from balancing.pipeline.schedule import Schedule, program

__all__ = ["expect", "expect_one_size", "with_flat_batches", "with_known_shapes"]

_SHAPES = "expected_shapes"  # in the config: direction -> shapes of messages that this stage will still receive


def expect(rows: Sequence[int], config: Any) -> None:
    """Set the shapes of the messages of a training step.

    rows: of each micro-batch, on this rank.
    config: the config of the model.
    """
    config.variable_seq_lengths = True
    rank, ranks = mpu.get_pipeline_model_parallel_rank(), mpu.get_pipeline_model_parallel_world_size()
    if ranks == 1:
        return
    chunks = config.virtual_pipeline_model_parallel_size or 1
    schedule = Schedule(config.microbatch_group_size_per_vp_stage, config.overlap_p2p_comm)
    actions = program(rank, ranks, len(rows), chunks=chunks, schedule=schedule)
    messages = [message for action in actions for message in action.receive]
    shapes = {
        kind: deque([rows[one.micro_batch], 1, config.hidden_size] for one in messages if one.kind == kind)
        for kind in ("forward", "backward")
    }
    setattr(config, _SHAPES, shapes)


def expect_one_size(config: Any) -> None:
    """End the step of a model with this config; all its messages must have come. Those of validation have one size."""
    config.variable_seq_lengths = False
    left = vars(config).pop(_SHAPES, {})
    assert not any(left.values()), "fewer messages came from other stages than the schedule has"


def with_known_shapes(original: Callable) -> Callable:
    """Megatron's `P2PCommunicator._communicate_shapes`, without communication in steps whose shapes are known."""

    @functools.wraps(original)
    def _communicate_shapes(
        self: Any, tensor_send_next: Any, tensor_send_prev: Any, recv_prev: bool, recv_next: bool
    ) -> tuple[list[int], list[int]]:
        expected = getattr(self.config, _SHAPES, None)
        if expected is None:
            return original(self, tensor_send_next, tensor_send_prev, recv_prev, recv_next)
        shapes = [
            expected[kind].popleft() if receives else [0, 0, 0]
            for kind, receives in (("forward", recv_prev), ("backward", recv_next))
        ]
        return shapes[0], shapes[1]

    return _communicate_shapes


def with_flat_batches(original: Callable) -> Callable:
    """Megatron's `get_forward_backward_func`, whose schedules take each micro-batch as one sequence."""

    @functools.wraps(original)
    def get_forward_backward_func(
        pp_size: int | None = None, vp_size: int | None = None, schedule_pg_collection: Any = None
    ) -> Callable:
        schedule = original(pp_size, vp_size, schedule_pg_collection)

        @functools.wraps(schedule)
        def flat(*, seq_length: int, micro_batch_size: int, **rest: Any) -> Any:
            if rest.get("decoder_seq_length") is not None:
                rest["decoder_seq_length"] *= micro_batch_size
            return schedule(seq_length=seq_length * micro_batch_size, micro_batch_size=1, **rest)

        return flat

    return get_forward_backward_func

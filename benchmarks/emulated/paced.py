"""A paced device: pipeline stages whose kernels are timed waits, run by Megatron's own schedule.

`PacedStage` stands for a chunk of layers: its forward and its backward each occupy the device for modelled seconds
(`balancing.clock.pace`) and use no CPU, so sixteen ranks keep their timing on two cores. `run_schedule` runs
megatron.core's schedule on such stages and times it. As a program it does so for a list of pipelines on the ranks of an
emulated cluster:

    python -m benchmarks.emulated ... -- -m benchmarks.emulated.paced '[{"forward": [[0.1], ...], ...}, ...]'

with each pipeline an object of `run_schedule`'s arguments, forward, backward and weight_gradient as [rank, chunk], the
first two also as [rank, chunk, micro_batch]. Rank 0 prints one JSON list with the measured step seconds of each.
"""

import json
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from balancing.clock import pace
from benchmarks.emulated.cluster import EmulatedCluster
from benchmarks.replaced import replace_name

__all__ = ["PacedStage", "run_pipelines", "run_schedule", "schedule_arguments"]

_TIMEOUT = timedelta(seconds=300)
_HIDDEN = 16  # float32 values a position of the activations


class _Paced(torch.autograd.Function):
    """The identity, slowly."""

    @staticmethod
    def forward(ctx: Any, given: torch.Tensor, stage: "PacedStage", micro_batch: int) -> torch.Tensor:
        ctx.stage, ctx.micro_batch = stage, micro_batch
        stage.occupy("forward", micro_batch)
        return given.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        stage = ctx.stage
        if stage.filled is not None:
            stage.filled.begin_backward(stage.chunk)
        stage.occupy("backward", ctx.micro_batch)
        if stage.filled is not None:
            stage.defer()
        return gradient.clone(), None, None


class PacedStage(torch.nn.Module):
    """A chunk of a pipeline rank that takes modelled time, with what Megatron's schedules ask of a model.

    config: a megatron.core TransformerConfig. forward, backward: seconds of each micro-batch. chunk: its number on
    the rank. message_bytes: the size of an activation, rounded up to positions of 64 bytes.
    log: where each pass leaves (kind, chunk, micro-batch, begin, end) in seconds of time.perf_counter.
    """

    def __init__(
        self,
        config: Any,
        forward: Sequence[float],
        backward: Sequence[float],
        *,
        chunk: int = 0,
        message_bytes: int = 4 * _HIDDEN,
        log: list | None = None,
    ):
        super().__init__()
        assert len(forward) == len(backward), "a forward and a backward for each micro-batch"
        self.config, self.chunk, self.log = config, chunk, log if log is not None else []
        self.model_type, self.vp_stage = None, None
        self.seconds = {"forward": tuple(map(float, forward)), "backward": tuple(map(float, backward))}
        self._next = 0
        self.filled: Any = None  # the schedule, if it fills waits with weight gradients
        self.defer: Callable[[], None] = lambda: None  # leave the weight gradients of a backward for later
        self._input: torch.Tensor | None = None
        self.source = torch.nn.Parameter(torch.zeros(_shape(message_bytes)))  # the first virtual stage's embedding

    def set_input_tensor(self, given: torch.Tensor | list[torch.Tensor | None] | None) -> None:
        """Take the activation of the stage before; None or [None] on the first one."""
        self._input = given[0] if isinstance(given, list) else given

    def forward(self) -> torch.Tensor:
        micro_batch, self._next = self._next, (self._next + 1) % len(self.seconds["forward"])
        if self.filled is not None:
            self.filled.begin_forward(self.chunk)
        given = self.source if self._input is None else self._input
        return _Paced.apply(given, self, micro_batch)

    def occupy(self, kind: str, micro_batch: int) -> None:
        """Spend the seconds of one pass."""
        begin = time.perf_counter()
        pace(self.seconds[kind][micro_batch])
        self.log.append((kind, self.chunk, micro_batch, begin, time.perf_counter()))


def _shape(message_bytes: int) -> tuple[int, int, int]:
    """Sequence, micro-batch and hidden size of an activation of that many bytes."""
    return -(-message_bytes // (4 * _HIDDEN)), 1, _HIDDEN


def _config(ranks: int, chunks: int, overlap: bool, fills: bool) -> Any:
    """Megatron's configuration for such a pipeline, as its training loop sets it."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    return TransformerConfig(
        num_layers=ranks * chunks,
        hidden_size=_HIDDEN,
        num_attention_heads=1,
        pipeline_model_parallel_size=ranks,
        virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
        pipeline_dtype=torch.float32,
        deallocate_pipeline_outputs=True,
        overlap_p2p_comm=overlap,
        batch_p2p_comm=not overlap and not fills,
    )


def _receives_first(p2p_op_list: list[dist.P2POp]) -> list[dist.Work]:
    """`torch.distributed.batch_isend_irecv` with the receives posted before the sends.

    NCCL runs the messages of a batch together. gloo would queue the note that a receive is ready behind the data of a
    send to the same rank that was posted before it, and the two directions of an exchange would follow each other.
    """
    return _batch_isend_irecv(sorted(p2p_op_list, key=lambda each: each.op is not dist.irecv))


_batch_isend_irecv = dist.batch_isend_irecv


def _loss(output: torch.Tensor) -> tuple[torch.Tensor, dict[str, float]]:
    return output.sum(), {}


def _forward_step(iterator: object, model: PacedStage) -> tuple[Any, Any]:
    return model(), _loss


def schedule_arguments(
    forward: np.ndarray,
    backward: np.ndarray,
    rank: int,
    micro_batches: int,
    overlap: bool,
    *,
    message_bytes: int = 4 * _HIDDEN,
    log: list | None = None,
    fills: bool = False,
) -> dict[str, Any]:
    """The keyword arguments with which Megatron's schedule runs one rank of a paced pipeline, process groups left out.

    forward, backward: seconds as [rank, chunk] or [rank, chunk, micro_batch]. message_bytes, log: see PacedStage; one
    log for all chunks. fills: whether waits are filled with weight gradients.
    """
    ranks, chunks = forward.shape[:2]
    config = _config(ranks, chunks, overlap, fills)
    stages = []
    for chunk in range(chunks):
        ahead, back = (np.broadcast_to(each[rank, chunk], (micro_batches,)).tolist() for each in (forward, backward))
        stages.append(PacedStage(config, ahead, back, chunk=chunk, message_bytes=message_bytes, log=log))
    return {
        "forward_step_func": _forward_step,
        "data_iterator": [None] * chunks,
        "model": stages,
        "num_microbatches": micro_batches,
        "seq_length": _shape(message_bytes)[0],
        "micro_batch_size": 1,
    }


def run_schedule(
    forward: np.ndarray,
    backward: np.ndarray,
    micro_batches: int,
    *,
    overlap: bool | None = None,
    message_bytes: int = 4 * _HIDDEN,
    repeats: int = 1,
    weight_gradient: np.ndarray | None = None,
    pieces: np.ndarray | None = None,
    activation: np.ndarray | None = None,
) -> list[float]:
    """Run Megatron's schedule over all ranks of the world, each a paced pipeline stage; the seconds of each step.

    forward, backward: as in `schedule_arguments`. weight_gradient: [rank, chunk], seconds of weight gradients, which
    then are no part of `backward` and fill waits; pieces, activation: as in `simulate_fill`. overlap: as in
    `balancing.layers.simulate_schedule`. A step lasts from the first rank's start to the last one's end. A step of no
    length goes before, which connects the ranks.
    """
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
    from megatron.core.process_groups_config import ProcessGroupCollection

    rank, (ranks, chunks) = dist.get_rank(), forward.shape[:2]
    assert ranks == dist.get_world_size(), f"{ranks} stages for {dist.get_world_size()} ranks"
    overlap = chunks > 1 if overlap is None else overlap
    schedule = get_forward_backward_func(ranks, chunks if chunks > 1 else None)
    groups = ProcessGroupCollection()
    groups.pp = dist.group.WORLD
    for each in range(ranks):
        alone = dist.new_group([each], timeout=_TIMEOUT)
        if each == rank:
            groups.tp = groups.cp = alone
    seconds = []
    fills = weight_gradient is not None
    for repeat in range(repeats + 1):
        scale = 1.0 if repeat else 0.0
        seconds_now = forward * scale, backward * scale
        arguments = schedule_arguments(
            *seconds_now, rank, micro_batches, overlap, message_bytes=message_bytes, fills=fills
        )
        communicator = P2PCommunicator(groups.pp, arguments["model"][0].config)
        finish = _fill(arguments["model"], *seconds_now, weight_gradient * scale, pieces, activation) if fills else None
        dist.barrier()
        begin = time.perf_counter()
        schedule(**arguments, p2p_communicator=communicator, pg_collection=groups)
        if finish is not None:
            finish()
        span = torch.tensor([-begin, time.perf_counter()], dtype=torch.float64)  # one clock for all ranks of a machine
        dist.all_reduce(span, op=dist.ReduceOp.MAX)
        seconds.append(float(span.sum()))
    return seconds[1:]


def _fill(
    stages: list[PacedStage],
    forward: np.ndarray,
    backward: np.ndarray,
    weight: np.ndarray,
    pieces: np.ndarray,
    activation: np.ndarray,
) -> Callable[[], None]:
    """Have `stages` of this rank defer weight gradients; returns what computes those that are left at the end."""
    from balancing.layers.simulated_fill import SplitPasses, simulate_fill
    from balancing.pipeline import operations
    from megatron.balanced.fill.schedule import FilledSchedule, use_filled_schedule

    rank, (ranks, chunks) = dist.get_rank(), forward.shape
    micro_batches = len(stages[0].seconds["forward"])
    step = simulate_fill(SplitPasses(forward, backward, weight, activation, pieces), micro_batches)
    deferred: deque[float] = deque()

    def compute(number: int) -> None:
        pace(sum(deferred.popleft() for _ in range(min(number, len(deferred)))))

    order = operations(ranks, micro_batches, chunks=chunks)[rank]
    schedule = FilledSchedule([(operation.kind, operation.chunk) for operation in order], step.fills[rank], compute)
    use_filled_schedule(stages[0].config, schedule)
    for stage, seconds, count in zip(stages, weight[rank], pieces[rank], strict=True):
        stage.filled = schedule
        if seconds:
            stage.defer = partial(deferred.extend, [float(seconds) / int(count)] * int(count))

    def finish() -> None:
        compute(len(deferred))
        use_filled_schedule(stages[0].config, None)

    return finish


def run_pipelines(cluster: EmulatedCluster, pipelines: Sequence[dict[str, Any]]) -> list[list[float]]:
    """Seconds of each step of each pipeline on as many emulated ranks. pipelines: arguments of `run_schedule`."""
    arguments = ["ignore", "-m", "benchmarks.emulated.paced", json.dumps(pipelines)]
    return json.loads(cluster.run("-W", arguments, timeout=_TIMEOUT.total_seconds()).output[0][-1])


def main() -> None:
    from megatron.balanced.cpu.device import use_cpu

    use_cpu()

    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

    from megatron.balanced.fill.schedule import with_filled_waits

    replace_name(torch.distributed, "batch_isend_irecv", _receives_first)
    replace_name(P2PCommunicator, "_communicate", with_filled_waits(P2PCommunicator._communicate))
    dist.init_process_group("gloo", timeout=_TIMEOUT)
    measured = []
    for pipeline in json.loads(sys.argv[1]):
        arrays = "forward", "backward", "weight_gradient", "pieces", "activation"
        pipeline |= {name: np.asarray(pipeline[name], dtype=float) for name in arrays if name in pipeline}
        measured.append(run_schedule(**pipeline))
    if dist.get_rank() == 0:
        print(json.dumps(measured), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Costs of layers in one iteration, from the measurements of all ranks.

A rank measures the device seconds of each pass of its layers. Combined over all ranks, this is the cost of the whole
model for any layout, so costs from before and after a move can be averaged. Memory is measured only per stage. Its
activations are the measured memory minus the known weights, gradients and optimizer state.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from balancing.layers.cost import LayerSeconds, over_ranks
from balancing.layers.memory import LayerMemory, stage_memory
from balancing.pipeline.fixed_parts import NAMES
from balancing.pipeline.schedule import MEGATRON_DEFAULTS, Schedule
from balancing.pipeline.stage_plan import StagePlan
from balancing.report.exposed import exposed_seconds
from balancing.report.record import RankRecord

__all__ = ["fit_activations", "join_ranks", "layer_seconds"]

FloatArray = NDArray[np.float64]


def layer_seconds(record: RankRecord, layers: int, *, in_turn: bool = False) -> FloatArray:
    """Seconds per micro-batch of each part of the model on one rank in one iteration.

    in_turn: whether the passes of two micro-batches alternate layer part by layer part. The wall-clock time of a pass
        then contains time of the other pass. Messages overlap with the other pass, so only their exposed part counts.

    Returns a float array [layers + fixed parts, 2, 2].
    Axis 0: the layers, and the parts of `balancing.pipeline.fixed_parts`; nan for what the rank does not hold.
    Axis 1: forward, and backward with recomputation.
    Axis 2: device seconds, and wall-clock seconds (with `in_turn`, device seconds plus exposed messages).

    A pass may have several spans, which follow each other among the spans of its part.
    """
    names = [*range(layers), *NAMES]
    seconds, passes = np.zeros((len(names), 2, 2)), np.zeros(len(names))
    latest: dict[int | str, int] = {}  # part -> micro-batch of its latest forward pass
    row: dict[int | str, int] = {name: number for number, name in enumerate(names)}
    for span in record.spans:
        if span.layer in row and span.kind in ("forward", "backward", "recompute"):
            seconds[row[span.layer], int(span.kind != "forward")] += span.busy, span.busy if in_turn else span.seconds
            if span.kind == "forward" and latest.get(span.layer) != span.micro_batch:
                latest[span.layer] = span.micro_batch
                passes[row[span.layer]] += 1
    counted = passes[:, None, None]
    means = np.where(counted > 0, seconds / np.maximum(counted, 1), np.nan)
    for (part, phase), exposed in exposed_seconds(record.spans).items():
        means[row[part], phase, 1] += exposed
    return means


def join_ranks(seconds: Sequence[FloatArray], experts: Sequence[int], *, tells_waiting: bool) -> list[LayerSeconds]:
    """The cost of the whole model in each of several iterations.

    seconds: for each rank an array [iteration, layers + fixed parts, 2, 2] of `layer_seconds`.
    experts: for each rank the number of its expert-parallel group.
    tells_waiting: whether device seconds exclude waits for other ranks, as in `over_ranks`.

    Raises ValueError if a part of the model was measured on no rank. The tail may be absent; it then costs 0.
    """
    measured, group = np.stack(seconds), np.asarray(experts)
    whole = np.empty(measured.shape[1:4])
    tail = measured.shape[2] - 1
    whole[:, tail] = 0.0
    for part in range(measured.shape[2]):
        holders = ~np.isnan(measured[:, 0, part, 0, 0])
        if not holders.any():
            if part == tail:
                continue
            raise ValueError(f"part {part} of {tail} (layers, embedding, head) was measured on no rank")
        device, wall = np.moveaxis(measured[holders, :, part], -1, 0)
        whole[:, part] = over_ranks(device, wall, group[holders], tells_waiting=tells_waiting)
    layers = measured.shape[2] - len(NAMES)
    return [LayerSeconds(*step[:layers].T, *map(tuple, step[layers:].tolist())) for step in whole]


def fit_activations(
    resting: LayerMemory,
    peaks: FloatArray,
    plan: StagePlan,
    micro_batches: int | None = None,
    schedule: Schedule = MEGATRON_DEFAULTS,
) -> LayerMemory:
    """Estimate activations from the measured peaks of the stages. Returns `resting` with these activations.

    resting: weights, gradients and optimizer state, without activations.
    peaks: float array [stage], the most bytes that a rank of each stage held under `plan`.
    plan: the plan in force when the peaks were measured.
    micro_batches, schedule: as in `in_flight`.

    All layers are assumed to have equal activations. Their size is the largest that the peak of any stage implies, so
    that no stage is underestimated.
    """
    ones = LayerMemory(np.zeros(plan.layers), activation=1.0)
    layers_in_flight = stage_memory(plan, ones, micro_batches, schedule)
    left = peaks - stage_memory(plan, resting, micro_batches, schedule)
    implied = np.where(layers_in_flight > 0, left / np.maximum(layers_in_flight, 1.0), 0.0)
    return replace(resting, activation=max(float(implied.max()), 0.0))

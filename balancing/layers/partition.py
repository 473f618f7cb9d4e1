"""The contiguous partition whose slowest stage is fastest, exactly, with memory as a hard limit.

DynMo probes for it with a binary search whose precision is absolute: costs far below it end on one stage, and more
stages than layers never end. Here it is dynamic programming over (stage, end of the stage), where a stage may take its
own fixed load (the embedding, the head, other chunks of its rank) and may refuse what does not fit its memory:

    best[s][j] = min over i of max(best[s - 1][i], load of stage s with layers i to j - 1)

Each stage is one [layer, layer] array operation, so 128 layers on 32 stages take about 2 ms. A second pass over the
partitions that reach the optimum picks the one that moves fewest bytes, and among these the most even.

With several chunks a stage the two halves of a rank's load stand far apart in the model, and the exact optimum is out
of reach in milliseconds. One group of chunks (the v-th of every rank) after the other is solved exactly with the others
held fixed, and the borders between groups are tried one layer either way, until nothing improves. That is a descent:
the result is as good as its starting points or better, and not always the optimum.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from balancing.layers.memory import LayerMemory, in_flight

__all__ = ["Problem", "memory_shortfall", "min_max", "optimal_bounds"]

FloatArray = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Problem:
    """What there is to divide.

    cost: [layer], seconds. embedding, head: seconds fixed to the first and the last stage. memory, limit: bytes, limit
    as [stage]; None if memory does not matter. home: [layer], the stage that holds each layer now, -1 if none does.
    weight: [layer], bytes to move a layer. least: fewest layers a chunk.
    """

    cost: FloatArray
    stages: int
    virtual: int
    embedding: float
    head: float
    memory: LayerMemory | None
    limit: FloatArray | None
    home: NDArray[np.int64]
    weight: FloatArray
    least: int
    micro_batches: int | None = None

    @property
    def layers(self) -> int:
        return len(self.cost)

    def fixed(self) -> FloatArray:
        """Seconds of each stage that no plan moves."""
        load = np.zeros(self.stages)
        load[0] += self.embedding
        load[-1] += self.head
        return load

    def loads(self, bounds: Sequence[int]) -> FloatArray:
        """Seconds of each stage: bounds are [virtual * stages + 1], the borders of the chunks along the pipeline."""
        prefix = _prefix(self.cost)
        chunk = np.diff(prefix[np.asarray(bounds)])
        return self.fixed() + chunk.reshape(self.virtual, self.stages).sum(0)

    def moved(self, bounds: Sequence[int]) -> float:
        """Bytes of the layers that change stage."""
        stage = np.repeat(np.arange(self.stages * self.virtual) % self.stages, np.diff(bounds))
        return float(self.weight[(stage != self.home) & (self.home >= 0)].sum())


def _prefix(values: FloatArray) -> FloatArray:
    return np.concatenate([[0.0], np.cumsum(values)])


def _sums(values: FloatArray) -> FloatArray:
    """[i, j] -> sum of values[i:j], 0 where j < i."""
    prefix = _prefix(values)
    return np.maximum(prefix[None, :] - prefix[:, None], 0.0)


def _spans(values: FloatArray, least: int) -> FloatArray:
    """[i, j] -> sum of values[i:j]; infinite where j < i + least."""
    place = np.arange(len(values) + 1)
    return np.where(place[None, :] >= place[:, None] + least, _sums(values), np.inf)


def min_max(load: Callable[[int], FloatArray], stages: int, layers: int) -> float:
    """The least possible maximum of load(stage)[i, j] over all ways to cut layers into consecutive [i, j); infinity if
    every way meets an infinite load."""
    best = np.full(layers + 1, np.inf)
    best[0] = -np.inf
    for stage in range(stages):
        best = np.maximum(best[:, None], load(stage)).min(axis=0)
    return float(best[layers])


def _cheapest(price: Callable[[int], FloatArray], stages: int, layers: int) -> list[int]:
    """The borders [stages + 1] of the cut with the least sum of price(stage)[i, j]; the last border is -1 if none is
    finite."""
    best = np.full(layers + 1, np.inf)
    best[0] = 0.0
    chosen = []
    for stage in range(stages):
        total = best[:, None] + price(stage)
        chosen.append(total.argmin(axis=0))
        best = total[chosen[-1], np.arange(layers + 1)]
    if not np.isfinite(best[layers]):
        return [-1] * (stages + 1)
    bounds = [layers]
    for choice in reversed(chosen):
        bounds.append(int(choice[bounds[-1]]))
    return bounds[::-1]


def _cut(problem: Problem, fixed: FloatArray, first: int, last: int, forbidden: list[FloatArray] | None) -> list[int]:
    """The best borders of one chunk a stage over layers first to last - 1, the stages having `fixed` loads already.

    forbidden: for each stage [i, j], 0 where those layers fit, infinite where not. Returns [] if nothing fits.
    """
    span = _spans(problem.cost[first:last], problem.least)
    layers = last - first

    def load(stage: int) -> FloatArray:
        return span + fixed[stage] + (forbidden[stage] if forbidden else 0.0)

    bottleneck = min_max(load, problem.stages, layers)
    if not np.isfinite(bottleneck):
        return []
    scale = max(bottleneck, np.finfo(float).tiny)
    home, weight = problem.home[first:last], problem.weight[first:last]

    def price(stage: int) -> FloatArray:
        own = load(stage)
        arrives = _sums(np.where((home != stage) & (home >= 0), weight, 0.0))
        with np.errstate(over="ignore"):
            return np.where(own <= bottleneck, arrives + 0.5 * (own / scale) ** 2 / problem.stages, np.inf)

    bounds = _cheapest(price, problem.stages, layers)
    assert bounds[0] == 0 and bounds[-1] == layers, f"the optimum {bottleneck} was not found again: {bounds}"
    return [first + bound for bound in bounds]


def _forbidden(problem: Problem, bounds: Sequence[int], group: int) -> list[FloatArray] | None:
    """Where chunk `group` of each stage would not fit beside the stage's other chunks in `bounds`."""
    if problem.memory is None or problem.limit is None:
        return None
    bytes_of = _bytes(problem, bounds, group)
    return [np.where(bytes_of(stage) <= problem.limit[stage], 0.0, np.inf) for stage in range(problem.stages)]


def _bytes(problem: Problem, bounds: Sequence[int], group: int) -> Callable[[int], FloatArray]:
    """stage -> [i, j], bytes of the stage if its chunk `group` holds layers i to j - 1 of that group's part of the
    model, and its other chunks what `bounds` say."""
    memory, stages, virtual = problem.memory, problem.stages, problem.virtual
    assert memory is not None and isinstance(memory.activation, np.ndarray)
    first, last = bounds[group * stages], bounds[(group + 1) * stages]
    static, activation = _sums(memory.static[first:last]), _sums(memory.activation[first:last])
    all_static, all_activation = _prefix(memory.static), _prefix(memory.activation)
    moments = in_flight(stages, virtual, problem.micro_batches)

    def of(stage: int) -> FloatArray:
        base, held = 0.0, np.zeros(virtual)
        for chunk in range(virtual):
            i, j = bounds[chunk * stages + stage], bounds[chunk * stages + stage + 1]
            if chunk != group:
                base += all_static[j] - all_static[i]
                held[chunk] = all_activation[j] - all_activation[i]
        if stage == 0:
            base, held[0] = base + memory.embedding, held[0] + memory.embedding_activation
        if stage == stages - 1:
            base, held[-1] = base + memory.head, held[-1] + memory.head_activation
        peak = np.full_like(static, -np.inf)
        for counts in moments[stage]:
            peak = np.maximum(peak, float(counts @ held) + counts[group] * activation)
        return base + static + peak

    return of


def optimal_bounds(problem: Problem, starts: Sequence[Sequence[int]]) -> list[int]:
    """Borders [virtual * stages + 1] of the best partition found; [] if no partition fits the memory.

    starts: partitions to begin from, used only with several chunks a stage.
    """
    if problem.virtual == 1:
        whole = [0] * problem.stages + [problem.layers]
        return _cut(problem, problem.fixed(), 0, problem.layers, _forbidden(problem, whole, 0))
    chunked = _even_chunks(problem)
    found = [_descend(problem, list(start)) for start in [chunked, *starts]]
    best = min(found, key=lambda bounds: _quality(problem, bounds))
    return best if _quality(problem, best)[0] <= 0 else []


def _even_chunks(problem: Problem) -> list[int]:
    """Borders that make the slowest chunk fastest, as if each were a stage of its own."""
    chunks = problem.stages * problem.virtual
    fixed = np.zeros(chunks)
    fixed[0], fixed[-1] = problem.embedding, problem.head
    nowhere = np.full(problem.layers, -1)
    each = replace(problem, stages=chunks, virtual=1, memory=None, limit=None, home=nowhere)
    return _cut(each, fixed, 0, problem.layers, None)


def _quality(problem: Problem, bounds: Sequence[int]) -> tuple[float, float, float, float]:
    """Less is better: bytes over the limit, the slowest stage, the slowest chunk, bytes moved."""
    over = 0.0
    if problem.memory is not None and problem.limit is not None:
        last = problem.virtual - 1
        bytes_of = _bytes(problem, bounds, last)
        first = bounds[last * problem.stages]
        ends = [bound - first for bound in bounds[last * problem.stages :]]
        over = max(
            float(bytes_of(stage)[i, j] - problem.limit[stage]) for stage, (i, j) in enumerate(pairwise(ends))
        )
        over = max(over, 0.0)
    chunk = np.diff(_prefix(problem.cost)[np.asarray(bounds)])
    chunk[0] += problem.embedding
    chunk[-1] += problem.head
    digits = 12  # sums in another order must not count as an improvement
    return over, _round(problem.loads(bounds).max(), digits), _round(chunk.max(), digits), problem.moved(bounds)


def _round(value: float, digits: int) -> float:
    return float(f"{value:.{digits}g}")


def _descend(problem: Problem, bounds: list[int]) -> list[int]:
    """Solve one group of chunks after the other, and try the borders between groups, until nothing improves."""
    stages, virtual = problem.stages, problem.virtual

    def solve(bounds: list[int], group: int) -> list[int]:
        first, last = bounds[group * stages], bounds[(group + 1) * stages]
        own = np.diff(_prefix(problem.cost)[np.asarray(bounds)]).reshape(virtual, stages)[group]
        cut = _cut(problem, problem.loads(bounds) - own, first, last, _forbidden(problem, bounds, group))
        return bounds[: group * stages] + cut + bounds[(group + 1) * stages + 1 :] if cut else bounds

    quality = _quality(problem, bounds)
    improved = True
    while improved:
        improved = False
        tries: list[tuple[int, int]] = [(group, 0) for group in range(virtual)]
        tries += [(group, step) for group in range(virtual - 1) for step in (-1, 1)]
        for group, step in tries:
            other = list(bounds)
            if step:
                border = (group + 1) * stages
                other[border] += step
                if min(np.diff(other)[border - 1 : border + 1]) < problem.least:
                    continue
                other = solve(other, group + (step > 0))
            other = solve(other, group)
            better = _quality(problem, other)
            if better < quality:
                bounds, quality, improved = other, better, True
    return bounds


def memory_shortfall(problem: Problem) -> float:
    """How many bytes over its limit the fullest stage is, at the least; not above 0 if a plan fits.

    Exact with one chunk a stage. With more, of the plan that divides the bytes most evenly over the chunks.
    """
    memory, limit = problem.memory, problem.limit
    assert memory is not None and limit is not None and isinstance(memory.activation, np.ndarray)
    if problem.virtual == 1:
        bytes_of = _bytes(problem, [0] * problem.stages + [problem.layers], 0)
        order = np.where(np.isfinite(_spans(problem.cost, problem.least)), 0.0, np.inf)
        return min_max(lambda stage: bytes_of(stage) - limit[stage] + order, problem.stages, problem.layers)
    held = memory.static + problem.stages * memory.activation
    return _quality(problem, _even_chunks(replace(problem, cost=held, embedding=memory.embedding, head=memory.head)))[0]

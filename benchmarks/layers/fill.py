"""What deferred weight gradients gain over Megatron's schedules at the same memory: simulated, nothing is trained.

    python -m benchmarks.layers.fill [--quick] [--json FILE]

Eight stages. Costs of the six kinds of dynamic models are those of `benchmarks.layers.traces`, at moments spread over
the run; three more models are static:

    Mixtral-like    32 equal layers, and a head of 32,000 words
    DeepSeek-like   3 dense layers, 58 with experts, and a head of 129,280 words (7168 wide, experts of 2048, 8 of 256)
    hybrid          52 layers of a pattern: state-space, feed-forward, and an attention layer every 13

Each is planned with 1, 2 and 3 chunks a stage (`plan_pipeline`) for Megatron's schedule. The bound of whole layers is
the slowest stage of the best plan, without warm-up and cool-down of the pipeline. The first columns are shares of this
bound: Megatron's schedule; the same plan with deferred weight gradients; a plan refined for these; the most that any
schedule of this plan can reach with any memory (`least_seconds`). Then follow the activations of the fullest stage over
those without deferring, and the gain.

The weight gradient takes half of the backward of a layer's matrices, nothing of that of attention scores; the head
computes its own at once. A layer keeps activations in proportion to its forward seconds, nothing if it is frozen.
Weight gradients are computed in pieces of one layer. Exit code 1 if a row of four micro-batches a stage or more misses
93 % of the bound.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from balancing.files import write_text
from balancing.layers import LayerSeconds, Pipeline, StagePlan, plan_pipeline, plan_stages
from balancing.layers.simulated_fill import FilledStep, SplitPasses, simulate_fill
from benchmarks.layers.traces import TRACES, trace

__all__ = ["Row", "filled_step", "rows"]

_STAGES, _LAYERS, _ITERATIONS = 8, 48, 4000
_TARGET = 0.93  # of the bound


@dataclass(frozen=True)
class Row:
    """Means over moments of a run.

    of_bound, filled, refined, possible: shares of the bound; see the module. memory: the fullest stage's activations,
    over those without deferring. speedup: of `refined` over Megatron's schedule.
    """

    case: str
    chunks: int
    micro_batches: int
    of_bound: float
    filled: float
    refined: float
    possible: float
    memory: float
    speedup: float

    @property
    def met(self) -> bool:
        return self.refined >= _TARGET or self.micro_batches < 4 * _STAGES


def _dense(layers: int, head: float) -> LayerSeconds:
    ones = np.ones(layers)
    return LayerSeconds(ones, 2 * ones, head=(head, 2 * head))


def _deepseek() -> LayerSeconds:
    """Products a token and layer, in units of hidden squared; attention is latent."""
    hidden, heads = 7168, 128
    attention = (1536 * (hidden + heads * 192) + 576 * hidden + 512 * heads * 256 + heads * 128 * hidden) / hidden**2
    dense, experts = 3 * 18432 / hidden, 9 * 3 * 2048 / hidden
    forward = attention + np.r_[np.full(3, dense), np.full(58, experts)]
    head = 129280 / hidden
    return LayerSeconds(forward, 2 * forward, head=(head, 2 * head))


def _hybrid() -> tuple[LayerSeconds, np.ndarray]:
    """A state-space layer costs 6 units of hidden squared and its scan, a feed-forward one 8, attention 4 and scores
    over 8192 tokens. Also the share of each backward that weight gradients take."""
    kinds = ["*" if at % 13 == 6 else "M" if at % 2 == 0 else "-" for at in range(52)]
    matrices = np.array([{"M": 6.0, "-": 8.0, "*": 4.0}[kind] for kind in kinds])
    without_weights = np.array([{"M": 1.5, "-": 0.0, "*": 8192 / 4096}[kind] for kind in kinds])
    forward, head = matrices + without_weights, 131072 / 4096
    return LayerSeconds(forward, 2 * forward, head=(head, 2 * head)), matrices / forward / 2


def _cases(moments: int) -> Iterator[tuple[str, list[LayerSeconds], np.ndarray | float]]:
    """Name, costs at moments of a run, and the share of weight gradients in a layer's backward."""
    for name in TRACES:
        run = trace(name, _LAYERS, _ITERATIONS)
        yield name, [run.costs[int(at)] for at in np.linspace(0, _ITERATIONS - 1, moments)], run.weight_share
    yield "Mixtral-like", [_dense(32, 0.5)], 0.5
    yield "DeepSeek-like", [_deepseek()], 0.5
    hybrid, share = _hybrid()
    yield "hybrid", [hybrid], share


def filled_step(
    cost: LayerSeconds, plan: StagePlan, weight_share: np.ndarray | float, micro_batches: int
) -> FilledStep:
    """The simulated step of `plan`."""
    return simulate_fill(cost.split_passes(plan, weight_share), micro_batches)


def least_seconds(passes: SplitPasses, micro_batches: int) -> float:
    """A bound on the step of any schedule in which a stage runs its first chunk forward after the stages before it, and
    backward before them: what fills a stage, its work, and what drains behind its input gradients, under which it may
    compute weight gradients."""
    forward, inputs, weights = passes.forward, passes.input_gradient, passes.weight_gradient
    fill, drain = (np.cumsum(part[:, 0]) - part[:, 0] for part in (forward, inputs))
    needed = micro_batches * (forward + inputs).sum(axis=1)
    late = np.maximum(micro_batches * weights.sum(axis=1), drain)
    return float((fill + needed + late).max())


def _refined(cost: LayerSeconds, plan: StagePlan, weight_share: np.ndarray | float, micro_batches: int) -> StagePlan:
    """`plan` with every boundary between chunks where a step with deferred weight gradients is shortest, one at a
    time."""
    best, seconds = plan, filled_step(cost, plan, weight_share, micro_batches).step_time
    improved = True
    while improved:
        improved = False
        for at in range(1, len(plan.bounds) - 1):
            for step in (-1, 1):
                bounds = list(best.bounds)
                bounds[at] += step
                if not bounds[at - 1] < bounds[at] < bounds[at + 1]:
                    continue
                other = StagePlan.from_bounds(bounds, plan.stages, plan.method)
                if (now := filled_step(cost, other, weight_share, micro_batches).step_time) < seconds * (1 - 1e-9):
                    best, seconds, improved = other, now, True
    return best


def rows(quick: bool, progress: Progress) -> Iterator[Row]:
    cases = list(_cases(3 if quick else 9))
    depths = (1, 2) if quick else (1, 2, 3)
    lengths = (4,) if quick else (1, 2, 4, 8)
    task = progress.add_task("simulating", total=len(cases) * len(depths) * len(lengths))
    for case, costs, weight_share in cases:
        for chunks in depths:
            for length in lengths:
                progress.advance(task)
                found = [
                    _at(cost, weight_share, chunks, length * _STAGES)
                    for cost in costs
                    if cost.layers >= chunks * _STAGES
                ]
                yield Row(case, chunks, length * _STAGES, *map(float, np.mean(found, axis=0)))


def _at(cost: LayerSeconds, weight_share: np.ndarray | float, chunks: int, micro_batches: int) -> tuple[float, ...]:
    best = plan_stages(cost.total, _STAGES, embedding=sum(cost.embedding), head=sum(cost.head))
    bound = micro_batches * float(cost.stage_loads(best).max())
    plan = plan_pipeline(cost, Pipeline(_STAGES, micro_batches, chunks))
    plain = cost.simulate(plan, micro_batches).step_time
    filled = filled_step(cost, plan, weight_share, micro_batches)
    found = _refined(cost, plan, weight_share, micro_batches)
    refined = filled_step(cost, found, weight_share, micro_batches)
    least = least_seconds(cost.split_passes(found, weight_share), micro_batches)
    memory = float(max(refined.peak.max() / refined.peak_without.max(), filled.peak.max() / filled.peak_without.max()))
    shares = (bound / each for each in (plain, filled.step_time, refined.step_time, least))
    return *shares, memory, plain / refined.step_time


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="three points of a run, four micro-batches a stage")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    args = parser.parse_args()
    with Progress(console=Console(stderr=True)) as progress:
        found = list(rows(args.quick, progress))
    table = Table(
        "case", "chunks", "micro-batches", "1F1B", "filled", "refined", "possible", "memory", "gain", box=None
    )
    for row in found:
        table.add_row(
            row.case, f"{row.chunks}", f"{row.micro_batches}", f"{row.of_bound:.1%}", f"{row.filled:.1%}",
            f"{row.refined:.1%}" + ("" if row.met else "  MISSED"), f"{row.possible:.1%}",
            f"{row.memory:.2f}", f"{row.speedup:.3f}",
        )  # fmt: skip
    Console(width=120).print(table)
    if args.json:
        write_text(args.json, json.dumps([asdict(row) | {"met": row.met} for row in found], indent=1) + "\n")
    return 0 if all(row.met for row in found) else 1


if __name__ == "__main__":
    sys.exit(main())

"""python -m benchmarks.whatif: the error of forecasts on published runs, fitted constants, and gains beside published.

python -m benchmarks.whatif              errors of steps and memory by source, and the worst
python -m benchmarks.whatif --fit        fits the constants again, and says what they do on rows left out; minutes
python -m benchmarks.whatif --gains      gains that forecasts promise beside gains that others measured
python -m benchmarks.whatif --emulated   steps of forecasts beside those of the emulated cluster, with its constants
python -m benchmarks.whatif --planners   processor seconds of the planners by number of ranks
"""

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import chain

import numpy as np

from balancing.cluster import Cluster
from balancing.experts import ExpertShape, TransferWindow, plan_replicas
from balancing.experts.config import ExpertConfig
from balancing.kernels.pairs import area_of_first
from balancing.layers.plan import plan_stages
from balancing.sequences.cost import limit_seconds
from balancing.sequences.plan import plan_sequences
from balancing.sequences.planners.groups import deal_areas, number_of_groups
from balancing.sequences.sequence_plan import AttentionShape
from balancing_tools.whatif.lengths import draw_batch
from balancing_tools.whatif.routing import sampled_load, zipf_popularity
from benchmarks.whatif.emulated import compare
from benchmarks.whatif.gains import compare_gains
from benchmarks.whatif.published import read_published

_SEVEN, _SEVENTY = AttentionShape(4096, 32, 8, 32, 14336), AttentionShape(8192, 64, 8, 80, 28672)
# Jobs whose planners are timed: the model, tokens of a sample, and context-parallel ranks that it is for.
PLANNED = (
    ("70 billion parameters, 32,768 tokens, context parallel 8", _SEVENTY, 32768, 8),
    ("7 billion parameters, 32,768 tokens", _SEVEN, 32768, 1),
    ("7 billion parameters, 8,192 tokens", _SEVEN, 8192, 1),
)


def main(arguments: list[str] | None = None) -> int:
    """Print one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("fit", "gains", "emulated", "planners"):
        parser.add_argument(f"--{name}", action="store_true")
    options = parser.parse_args(arguments)
    if options.gains:
        _gains()
    elif options.emulated:
        _emulated()
    elif options.planners:
        _planners()
    elif options.fit:
        from benchmarks.whatif.fit import fit, held_out

        print(fit(read_published()))
        left = np.abs(held_out(read_published()))
        print(f"rows left out of the fit: median {np.median(left):.1%}, worst {left.max():.1%}")
    else:
        _errors()
    return 0


def _errors() -> None:
    rows = read_published()
    steps = np.array([row.error() for row in rows])
    print(f"{'source':10}{'rows':>5}{'median':>9}{'worst':>9}   worst row")
    for source in (*dict.fromkeys(row.source for row in rows), "all"):
        own = [at for at, row in enumerate(rows) if source in (row.source, "all")]
        worst = own[int(np.abs(steps[own]).argmax())]
        print(f"{source:10}{len(own):5}{np.median(np.abs(steps[own])):9.1%}{steps[worst]:+9.1%}   {rows[worst].name}")
    memory = np.array([row.memory_error for row in rows if row.memory_error is not None])
    print(f"memory of {len(memory)} rows: median {np.median(np.abs(memory)):.1%}, from {memory.min():+.1%} to "
          f"{memory.max():+.1%}")  # fmt: skip


def _gains() -> None:
    print(f"{'measured by':33}{'none':>9}{'balanced':>10}{'gain':>6}  {'published':24}{'even':>5}{'published':>10}"
          f"{'error':>8}  max / mean")  # fmt: skip
    for row in compare_gains():
        seconds = f"{row.none:8.2f}s{row.balanced:9.2f}s{row.none / row.balanced:6.2f}"
        bound = "" if row.error is None else f"{row.none / row.even:5.2f}{row.published_even:10.2f}{row.error:+8.1%}"
        level = f"{row.imbalance[0]:.2f} to {row.imbalance[1]:.2f}"
        print(f"{row.name:33}{seconds}  {row.published:24}{bound:23}  {level}")


def _emulated() -> None:
    rows = compare()
    print(f"{'configuration':38}{'':10}{'emulated':>10}{'forecast':>10}{'error':>8}   gain{'forecast':>10}{'error':>8}")
    for row in rows:
        gain, told = row.gains
        gains = "", f"{gain:7.2f}{told:10.2f}{told / gain - 1:+8.1%}"
        for at, which in enumerate(("without", "with")):
            seconds = f"{row.emulated[at]:8.2f} s{row.forecast[at]:8.2f} s{row.errors[at]:+8.1%}"
            print(f"{'' if at else row.name:38}{which:10}{seconds}{gains[at]}")
    errors = np.abs([row.errors for row in rows])
    print(f"within 10 %: {(errors.max(1) <= 0.1).sum()} of {len(rows)} configurations, {(errors <= 0.1).sum()} of "
          f"{errors.size} steps; median {np.median(errors):.1%}, worst {errors.max():.1%}")  # fmt: skip


def _planners() -> None:
    print(f"{'':7}{'sequences, one plan':>20}{'in groups':>20}   {'of a micro-batch, %':>22}{'area, max / mean':>20}")
    print(f"{'ranks':>7}{'chunks':>20}{'chunks':>20}{'chunks':>25}{'one':>10}{'groups':>10}   milliseconds")
    for name, shape, tokens, context in PLANNED:
        print(name)
        for ranks in (64, 256, 1024, 4096, 16384):
            _sequence_planners(ranks, shape, tokens, context)
    print(f"\n{'ranks':>7}{'experts':>12}{'layers':>9}   milliseconds")
    for ranks in (64, 256, 1024, 4096, 16384):
        _other_planners(ranks)


def _sequence_planners(ranks: int, shape: AttentionShape, tokens: int, context: int) -> None:
    """Time plans over all data-parallel ranks. tokens: of a sample. context: ranks that it is for."""
    random = np.random.default_rng(0)
    samples = [draw_batch("prolong", tokens, random) for _ in range(ranks // context)]
    ends, cluster = np.cumsum([len(sample) for sample in samples]), Cluster.sheet("h100-8x400g").relabel(ranks // 8, 8)
    lengths = np.fromiter(chain.from_iterable(samples), np.int64, int(ends[-1]))
    one, plan = _timed(partial(plan_sequences, lengths, cluster, shape=shape), 1 + (ranks < 4096))
    grouped, areas = _timed(partial(_of_heaviest_group, lengths, ends, ranks, shape), 3)
    fullest = plan.area.max() / plan.area.mean(), areas.max() * ranks / area_of_first(lengths).sum()
    batch = 1e3 * limit_seconds(lengths.tolist(), cluster, shape)
    figures = f"{one:20.1f}{grouped:20.1f}{grouped / batch:25.2%}" + "".join(f"{each:10.3f}" for each in fullest)
    print(f"{ranks:7,}{figures}", flush=True)


def _other_planners(ranks: int) -> None:
    """Time plans of experts for one layer, whose group has at most as many ranks as experts, and plans of layers."""
    slots = ExpertConfig().replica_slots
    random, group = np.random.default_rng(0), min(ranks, 256)  # DeepSeek-V3 has 256 experts, a rank has at least one
    load = sampled_load(zipf_popularity(256, group, 2.0, random), group, 32768, random)
    few, expert = Cluster.sheet("h100-8x400g").relabel(group // 8, 8), ExpertShape(7168, 2048, 2)
    experts, _ = _timed(partial(plan_replicas, load, few, slots=slots, shape=expert, window=TransferWindow(1e-3)), 3)
    layers, _ = _timed(partial(plan_stages, np.linspace(1, 2, 128), 32), 3)
    print(f"{ranks:7,}{experts:12.1f}{layers:9.1f}", flush=True)


def _of_heaviest_group(lengths: np.ndarray, ends: np.ndarray, ranks: int, shape: AttentionShape) -> np.ndarray:
    """Area of each rank of the group that has most, planned as a rank of it plans: groups first, then its own.

    lengths: int64 [document], of all samples. ends: int64 [sample], documents of the samples up to this one.
    """
    groups, starts = number_of_groups(len(ends)), np.append(0, ends[:-1])
    area = np.add.reduceat(area_of_first(lengths), starts)
    dealt = deal_areas(area, groups)
    heaviest = int(np.bincount(dealt, area).argmax())
    held = np.flatnonzero(dealt == heaviest)
    own = np.concatenate([lengths[start:end] for start, end in zip(starts[held], ends[held], strict=True)])
    cluster = Cluster.sheet("h100-8x400g").relabel(ranks // groups // 8, 8)
    return plan_sequences(own, cluster, shape=shape).area


def _timed[T](action: Callable[[], T], repeats: int) -> tuple[float, T]:
    """Milliseconds of processor time of one thread, the quickest of several, and what came out."""
    found = []
    for _ in range(repeats):
        begin = time.thread_time()
        result = action()
        found.append(1e3 * (time.thread_time() - begin))
    return min(found), result


if __name__ == "__main__":
    sys.exit(main())

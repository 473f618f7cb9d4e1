"""All three balancers together on 8 emulated ranks, each alone, each pair, and the limit.

    python -m benchmarks.together [--quick] [--json FILE]
    python -m benchmarks.together --demo DIR [--short]

The real trainer (`benchmarks.together.ranks`) on an emulated cluster of 4 nodes with 2 ranks each: pipeline parallel 2,
context parallel 4, expert parallel 4, context-parallel ranks being the expert-parallel ones. The workload is uneven in
three ways (`benchmarks.together.workload`). Without balanced sequences, documents are spread by Megatron-LM's own
scheduler of packed documents. The limit is the same work with even layers, documents and routing, unbalanced. Each
run has its own ranks; runs take turns, and the median of the steps after the move of layers counts. `none` runs at the
beginning and at the end of each turn, which says how noisy the machine is.

--demo (`benchmarks.together.demo`) runs each balancer alone and all together once, at a pace that this machine can
keep, and draws what each gains and the pipeline.
"""

import argparse
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from balancing.command_line import whole_number
from benchmarks.command import load_before, parser, write_rows
from benchmarks.together.demo import MICRO_BATCHES, demonstrate, emulated, quick_steps
from benchmarks.together.ranks import prepare, train
from benchmarks.together.workload import VARIANTS

__all__ = ["main", "rows_of"]

_COUNTED = 2  # steps, the last ones of a run


@dataclass(frozen=True)
class Row:
    """A line of the table.

    seconds: median of a step.
    gain: over none.
    to_limit: pace as a fraction of the limit's.
    alone: product of the gains that its balancers have alone.
    """

    name: str
    seconds: float
    gain: float
    to_limit: float
    alone: float | None
    steps: int


def rows_of(steps: dict[str, list[float]]) -> list[Row]:
    """The table of measured steps, by name of the variant."""
    median = {name: statistics.median(seconds) for name, seconds in steps.items()}
    gain = {name: median["none"] / seconds for name, seconds in median.items()}
    rows = []
    for name in steps:
        parts = ["layers", "sequences", "experts"] if name == "all" else name.split(" + ")
        alone: float | None = None
        if len(parts) > 1 and set(parts) <= gain.keys():
            alone = 1.0
            for part in parts:
                alone *= gain[part]
        rows.append(Row(name, median[name], gain[name], median["limit"] / median[name], alone, len(steps[name])))
    return rows


def _measure(turns: int, seconds: float, folder: Path) -> tuple[dict[str, list[float]], list[list[float]], str | None]:
    """Steps by variant; the medians of `none`, in the order of its runs; and why the network is not limited."""
    steps: dict[str, list[float]] = {name: [] for name in VARIANTS}
    noise: list[list[float]] = []
    with emulated() as cluster:
        for turn in range(turns):
            for number, name in enumerate([*VARIANTS, "none"]):
                own = folder / f"{turn}-{number}"
                variant = VARIANTS[name]
                quick = quick_steps(variant)
                found = train(
                    cluster, variant, own, steps=quick[-1] + 1 + _COUNTED, micro_batches=MICRO_BATCHES,
                    seconds=seconds, quick=quick,
                )[-_COUNTED:]  # fmt: skip
                steps[name] += found
                if name == "none":
                    noise.append(found)
                text = ", ".join(f"{each:.2f}" for each in found)
                print(f"turn {turn + 1} of {turns}, {name}: {text} s", file=sys.stderr, flush=True)
        return steps, noise, cluster.not_shaped_because


def _bench(options: argparse.Namespace) -> int:
    load = load_before()
    with tempfile.TemporaryDirectory() as folder:
        steps, noise, reason = _measure(1 if options.quick else 2, options.pace / 1e3, Path(folder))
    rows = rows_of(steps)
    network = f"network not limited: {reason}" if reason else "NICs limited"
    print(f"emulated: 4 nodes x 2 ranks, PP 2, CP 4, EP 4; {network}; {load}")
    print("sequences planned with chunks, of none with hybrid; layers may move in each step\n")
    print(f"{'':20}  s/step    gain  of the limit  product of gains alone  steps")
    for row in rows:
        alone = "" if row.alone is None else f"{row.alone:.3f}"
        print(f"{row.name:20}  {row.seconds:6.2f}  {row.gain:6.3f}  {row.to_limit:12.1%}  {alone:>22}  {row.steps:5}")
    medians = [statistics.median(each) for each in noise]
    print(f"\nnoise: runs of none differ by {max(medians) / min(medians) - 1:.1%}")
    together = next(row for row in rows if row.name == "all")
    assert together.alone is not None
    for what, found, target in (
        ("all three, of the limit's pace", together.to_limit, 0.95),
        ("all three, of the product of gains alone", together.gain / together.alone, 0.95),
    ):
        print(f"{what}: {found:.1%}, target {target:.0%}: {'met' if found >= target else 'missed'}")
    write_rows(options.json, rows)
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    options_of = parser("together", __doc__, "one turn, noisier figures")
    options_of.add_argument(
        "--pace", type=whole_number(1, 60_000), default=300, metavar="MS",
        help="milliseconds of a layer's forward pass (300); more takes longer and makes the host's own work a smaller "
        "part of a step",
    )  # fmt: skip
    options_of.add_argument(
        "--demo", metavar="DIR", help="run each balancer alone and all together; draw the gains into DIR"
    )
    options_of.add_argument(
        "--short", action="store_true", help="with --demo: two runs of short steps, for a first try"
    )
    options = options_of.parse_args(arguments)
    prepare()
    if options.demo:
        return demonstrate(Path(options.demo), options.short)
    return _bench(options)


if __name__ == "__main__":
    sys.exit(main())

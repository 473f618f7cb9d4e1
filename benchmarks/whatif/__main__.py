"""python -m benchmarks.whatif: the error of forecasts on published runs, fitted constants, and gains beside published.

python -m benchmarks.whatif              errors of steps and memory by source, and the worst
python -m benchmarks.whatif --fit        fits the constants again, and says what they do on rows left out; minutes
python -m benchmarks.whatif --gains      gains that forecasts promise beside gains that others measured
python -m benchmarks.whatif --emulated   steps of forecasts beside those of the emulated cluster, with its constants
"""

import argparse
import sys

import numpy as np

from benchmarks.whatif.emulated import compare
from benchmarks.whatif.gains import compare_gains
from benchmarks.whatif.published import read_published


def main(arguments: list[str] | None = None) -> int:
    """Print one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("fit", "gains", "emulated"):
        parser.add_argument(f"--{name}", action="store_true")
    options = parser.parse_args(arguments)
    if options.gains:
        _gains()
    elif options.emulated:
        _emulated()
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


if __name__ == "__main__":
    sys.exit(main())

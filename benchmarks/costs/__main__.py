"""Costs that planners plan with, against measurements.

    python -m benchmarks.costs             measured points against the table
    python -m benchmarks.costs --plans     plans under the sheet's one rate and under measured rates; a minute

Points of one H100, fitted on half of them and shown on the other half, and what they say of the host of today's engine
(`benchmarks.costs.measured`).

Nothing runs on a GPU here. Exit code 1 if a point of the table of presets is off by more than 10 % of its measurement,
but for those that `KNOWN` explains.
"""

import argparse
import sys
from collections.abc import Sequence

from balancing.cluster.rates import ACCURACY
from benchmarks.costs.measured import Point, host_points, host_today, points
from benchmarks.costs.plans import planned

__all__ = ["KNOWN", "main"]

# Points that the table misses by more than 10 %, and why.
KNOWN = {
    "cudnn, forward, packed, 72k": "slower than any of its documents alone; the backward pass is faster than any",
    "host, gather, 132 operations": "65 pieces a call, and Python handles each; the others have 4 to 39",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the tables; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.costs", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--plans", action="store_true", help="plans under the sheet and under measured rates")
    if parser.parse_args(arguments).plans:
        _plans()
        return 0
    return 0 if _points() else 1


def _points() -> bool:
    found = [*points(), *host_points()]
    print(f"{'one H100: TFLOP/s, host in ms':44}{'measured':>9}{'half':>8}{'':8}{'table':>8}")
    for point in found:
        half, table = (_error(each, point.measured) for each in (point.half, point.table))
        figures = f"{point.measured:9.1f}{point.half:8.1f} {half:+7.1%} {point.table:7.1f} {table:+7.1%}"
        print(
            f"{point.what:44}{figures}  {'fitted' if point.fitted else 'shown'}  {KNOWN.get(point.what, '')}".rstrip()
        )
    print(f"{'derived for today, not measured on a GPU':44}{'least':>9}{'most':>8}{'':8}{'table':>8}")
    for row in host_today():
        print(f"{row.what:44}{row.low:9.1f}{row.high:8.1f}{'':8}{row.table:8.1f}")
    print()
    off = [point for point in found if _far(point) and point.what not in KNOWN]
    print(f"within {ACCURACY:.0%}: {len(found) - sum(map(_far, found))} of {len(found)} points\n")
    return not off


def _far(point: Point) -> bool:
    return max(abs(_error(each, point.measured)) for each in (point.half, point.table)) > ACCURACY


def _error(found: float, measured: float) -> float:
    return found / measured - 1


def _plans() -> None:
    print(f"{'ranks':>5}  {'planned by':18}{'device':>8}{'host':>8}{'time max/mean':>15}{'area max/mean':>15}")
    for row in planned():
        print(
            f"{row.ranks:5}  {row.method:18}{row.device:8.2f}{row.host:8.2f}{row.time:15.3f}{row.area:15.3f}",
            flush=True,
        )


if __name__ == "__main__":
    sys.exit(main())

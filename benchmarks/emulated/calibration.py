"""Calibration of the emulated cluster: measured times against computed ones.

    python -m benchmarks.emulated.calibration [--quick] [--json FILE]

- Megatron's own 1F1B schedule over gloo with paced stages, all equal: (m + P - 1) t. Within 5 %.
- The same with one stage twice as slow, and the interleaved schedule with unequal chunks: the exact simulation of
  `balancing.layers`. Within 5 %.
- Both again on four nodes with messages that take a sixth of a stage's time. Within 5 %.
- Kernels of a device whose host takes half or twice as long to start them. Within 5 %.
- Messages over the limited network: bytes / rate, alone, in both directions, sharing a NIC, over two NICs. Within 10 %.
  Messages within a node: less than a fifth of that.

Each case is timed several times and the quickest counts: whatever else runs on the machine can only slow it down.
Takes 4 minutes on two idle cores, with --quick less than one. Exit code 1 if a row is out of its bounds.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from balancing.pipeline import Schedule, simulate_schedule
from benchmarks.command import exit_code, load_before, parser, show_table, write_rows
from benchmarks.emulated import EmulatedCluster
from benchmarks.emulated.device import Device
from benchmarks.emulated.paced import run_pipelines
from benchmarks.emulated.rate import format_rate, parse_rate

__all__ = ["Row", "main", "pipelines", "transfers"]

_TIMEOUT = 300.0  # seconds for one launch of ranks
_NIC = "25MB/s"
_MEGABYTES = 10
_KERNELS = 20
_FORWARD = 0.1  # seconds of a forward; with its backward a stage takes 0.3 s


@dataclass(frozen=True)
class Row:
    """One comparison. measured, expected: seconds. low, high: the bounds of measured / expected."""

    name: str
    method: str
    measured: float
    expected: float
    low: float
    high: float

    @property
    def ratio(self) -> float:
        return self.measured / self.expected

    @property
    def within(self) -> bool:
        return self.low <= self.ratio <= self.high


@dataclass(frozen=True)
class _Pipeline:
    name: str
    method: str
    forward: np.ndarray  # [rank, chunk], seconds; a backward takes twice as long
    micro_batches: int
    overlap: bool | None = None
    transfer: float = 0.0  # seconds a message takes

    def job(self) -> dict[str, object]:
        """The arguments of `benchmarks.emulated.paced.run_schedule`."""
        seconds = {"forward": self.forward.tolist(), "backward": (2 * self.forward).tolist()}
        size = {"message_bytes": round(self.transfer * parse_rate(_NIC))} if self.transfer else {}
        return seconds | {"micro_batches": self.micro_batches, "overlap": self.overlap} | size

    def expected(self) -> float:
        if self.method == "formula":
            return (self.micro_batches + len(self.forward) - 1) * 3 * float(self.forward.max())
        schedule = Schedule(overlap=self.overlap)
        return simulate_schedule(
            self.forward, 2 * self.forward, self.micro_batches, schedule=schedule, transfer=self.transfer
        ).step_time


def _plain(ranks: int, micro_batches: int, transfer: float = 0.0) -> list[_Pipeline]:
    equal = np.full((ranks, 1), _FORWARD)
    slow = equal.copy()
    slow[ranks // 3] *= 2
    size = f"P={ranks} m={micro_batches}"
    if transfer:
        size += f", messages of {transfer:g} s"
    return [
        _Pipeline(
            f"1F1B, equal, {size}", "simulation" if transfer else "formula", equal, micro_batches, None, transfer
        ),
        _Pipeline(f"1F1B, one stage 2x slower, {size}", "simulation", slow, micro_batches, None, transfer),
    ]


def _interleaved(ranks: int, micro_batches: int) -> list[_Pipeline]:
    mixed = np.random.default_rng(0).uniform(0.5 * _FORWARD, 1.5 * _FORWARD, (ranks, 2))
    size = f"P={ranks} m={micro_batches} v=2"
    return [
        _Pipeline(f"interleaved, all chunks differ, {size}", "simulation", mixed, micro_batches),
        _Pipeline(f"same without overlap, {size}", "simulation", mixed, micro_batches, overlap=False),
    ]


def pipelines(cases: Sequence[_Pipeline], cluster: EmulatedCluster, repeats: int) -> list[Row]:
    """Time Megatron's schedules with paced stages, one rank a stage. Raises RankFailed and RunTimeout."""
    measured = run_pipelines(cluster, [case.job() | {"repeats": repeats} for case in cases])
    return [
        Row(case.name, case.method, min(seconds), case.expected(), 0.95, 1.05)
        for case, seconds in zip(cases, measured, strict=True)
    ]


def hosts() -> list[Row]:
    """Kernels of a device and the host that starts them, in this process. Whichever is slower sets the pace."""
    rows = []
    for name, host, kernel in (("the host is slower", 0.04, 0.02), ("the device is slower", 0.02, 0.04)):
        device = Device()
        device.begin()
        begin = time.perf_counter()
        for _ in range(_KERNELS):
            device.issue(host)
            device.run(kernel)
        device.finish()
        expected = (_KERNELS - 1) * max(host, kernel) + host + kernel
        rows.append(Row(f"{_KERNELS} kernels, {name}", "formula", time.perf_counter() - begin, expected, 0.95, 1.05))
    return rows


def _all_pipelines(quick: bool) -> list[Row]:
    with EmulatedCluster(1, 8) as cluster:
        if quick:
            return pipelines(_plain(8, 4), cluster, repeats=2)
        rows = pipelines(_plain(8, 8) + _interleaved(8, 8), cluster, repeats=3)
    with EmulatedCluster(1, 16) as cluster:
        rows += pipelines(_plain(16, 16), cluster, repeats=2)
    with EmulatedCluster(4, 1, nic=_NIC) as cluster:
        if cluster.shaped:
            slow = 0.05
            chunks = np.full((4, 2), _FORWARD)
            name = f"interleaved, equal, P=4 m=8 v=2, messages of {slow:g} s"
            cases = [*_plain(4, 8, slow), _Pipeline(name, "simulation", chunks, 8, transfer=slow)]
            rows += pipelines(cases, cluster, repeats=2)
    return rows


# Two nodes of three ranks and two NICs: ranks 0 and 1 share NIC 0 of node 0, rank 2 has NIC 1; 3, 4 and 5 are the
# same of node 1.
_PATTERNS = {  # name: (messages that start together, how many of them the busiest NIC carries in one direction)
    "one message": ("0-3", 1),
    "both directions at once": ("0-3,3-0", 1),
    "two ranks share a NIC": ("0-3,1-4", 2),
    "two NICs side by side": ("0-3,2-5", 1),
    "two NICs crosswise": ("0-5,2-3", 1),
    "two NICs into one": ("0-3,2-4", 2),
    "within a node, same NIC": ("0-1", 0),
    "within a node, other NIC": ("0-2", 0),
}


def transfers(repeats: int) -> tuple[list[Row], str | None]:
    """Time messages over limited NICs. Returns no rows and the reason where the network cannot be limited."""
    size = _MEGABYTES * 10**6
    alone = size / parse_rate(_NIC)
    with EmulatedCluster(2, 3, nics_per_node=2, nic=_NIC) as cluster:
        if not cluster.shaped:
            return [], cluster.not_shaped_because
        patterns = [pattern for pattern, _ in _PATTERNS.values()]
        run = cluster.run(
            "-m",
            ["benchmarks.emulated.transfers", str(size), str(repeats), *patterns],
            timeout=_TIMEOUT,
        )
    seconds = json.loads(run.output[0][-1])
    rows = []
    for name, (pattern, load) in _PATTERNS.items():
        bounds = (0.9, 1.1) if load else (0.0, 0.2)
        title = f"{_MEGABYTES} MB at {format_rate(parse_rate(_NIC))}, {name}"
        rows.append(Row(title, "bytes / rate", seconds[pattern], max(load, 1) * alone, *bounds))
    return rows, None


def _print(rows: Sequence[Row]) -> None:
    lines = [
        (row.name, row.method, f"{row.measured:.3f}", f"{row.expected:.3f}", f"{row.ratio:.3f}",
         f"{row.low:.2f}-{row.high:.2f}" + ("" if row.within else "  OUT OF BOUNDS")) for row in rows
    ]  # fmt: skip
    show_table("", ("case", "method", "measured, s", "expected, s", "ratio", "bounds"), lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    options_of = parser("emulated.calibration", __doc__, "8 ranks, fewer cases, fewer repeats; under a minute")
    options = options_of.parse_args(arguments)
    return exit_code("calibration", lambda: _run(options))


def _run(options: argparse.Namespace) -> int:
    load = load_before()
    print(f"{load}; emulated cluster on the CPU", flush=True)
    rows, reason = transfers(repeats=2 if options.quick else 3)
    if reason is not None:
        print(f"no transfers: the network cannot be limited ({reason})", flush=True)
    rows = _all_pipelines(options.quick) + hosts() + rows
    _print(rows)
    write_rows(options.json, rows, "ratio", "within", load=load)
    return 0 if all(row.within for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())

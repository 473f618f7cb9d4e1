"""The demonstration of `scripts/demo.sh`: what each balancer gains alone, what all gain, and the limit.

Computation is modelled time, so what this machine itself needs for a step is too much in every figure. It is measured
first, by steps of even work at a quick pace. Then the pace is chosen such that it is below `_SHARE` of a step of the
limit. On a machine that is so busy that this would take too long, the demonstration says so and ends.

A run that moves no layers takes a quick step to warm up, then the one that counts. A run that moves layers does so
after its third step. That step is the one of no balancer, after two quick ones; the fourth warms up again.
"""

import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from balancing.report import read_history
from balancing.report.events import imbalance
from balancing.report.gains import gains
from benchmarks.emulated import EmulatedCluster
from benchmarks.together.ranks import train
from benchmarks.together.workload import FROZEN, LAYERS, VARIANTS, Pace, Variant, lengths_of

__all__ = ["BUSY", "MICRO_BATCHES", "demonstrate", "emulated", "pace_of", "quick_steps"]

MICRO_BATCHES = 3
BUSY = 3  # exit code
_SHARE = 0.05  # of a step
_MORE = 1.3  # times the host's work of a quick step: at most that of a step that counts
_TRIED = 0.1  # seconds of a layer, to measure the machine
_SHORTEST, _LONGEST = 8.0, 60.0  # seconds of a step of the limit
_STEPS = 11  # as many steps of the limit take as long as all runs
_ALONE = ("layers", "sequences", "experts")


def emulated() -> EmulatedCluster:
    """4 nodes of 2 ranks."""
    return EmulatedCluster(4, 2, nic="400MB/s")


def quick_steps(variant: Variant) -> tuple[int, ...]:
    """The steps, from 0, that only warm up. Behind the last one steps count."""
    return (0, 1, 3) if variant.layers else (0,)


def pace_of(step: float) -> float:
    """Seconds of a layer with which a step of even work takes `step` seconds."""
    return step / Pace(1.0, even=True).step(MICRO_BATCHES)


def demonstrate(folder: Path, short: bool) -> int:
    """Run, print and draw everything. Returns the exit code.

    folder: for logs, reports and the picture.
    short: two runs of short steps, to try it.
    """
    from benchmarks.together.figure import BEFORE, draw

    with emulated() as cluster:
        print(
            f"{cluster.ranks} emulated ranks (PP 2, CP 4, EP 4): {FROZEN} of {LAYERS} layers frozen, documents and "
            "routing uneven" + ("" if cluster.shaped else f" (network not limited: {cluster.not_shaped_because})"),
            flush=True,
        )
        even = 0.6
        if not short:
            own = _MORE * _own_seconds(cluster, folder / "pace")
            even = max(_SHORTEST, own / _SHARE)
            if even > _LONGEST:
                print(
                    f"This machine is too busy: its own work takes {own:.1f} s a step, and less than {_SHARE:.0%} of a "
                    f"step would take {_STEPS * even / 60:.0f} minutes; try again when it does less",
                    file=sys.stderr,
                )
                return BUSY
            print(
                f"This machine's own work takes {own:.1f} s a step, so a step of even work is paced to {even:.0f} s; "
                f"{_STEPS * even / 60 + 0.8:.0f} minutes",
                flush=True,
            )
        seconds: dict[str, float] = {}
        for name in ("layers", "all") if short else (*_ALONE, "all", "limit"):
            print(f"{name:10}", end="", flush=True)
            steps = _run(cluster, name, folder / name, pace_of(even))
            if name == "layers":
                # Without the move, which the time until the next step begins includes.
                seconds["none"] = float(read_history(folder / name / "report").stages[BEFORE]["step_s"])
            seconds[name] = steps[-1]
            print(f"{steps[-1]:6.1f} s a step, {seconds['none'] / steps[-1]:.2f} times none", flush=True)
    draw(seconds, folder / "layers" / "report", folder / "all" / "report", folder / "together.png")
    if not short:
        print(f"\n{_told(seconds, even, folder)}")
    return 0


def _own_seconds(cluster: EmulatedCluster, folder: Path) -> float:
    """Seconds a step that this machine takes longer than what is modelled."""
    steps = train(
        cluster, VARIANTS["limit"], folder, steps=3, micro_batches=MICRO_BATCHES, seconds=_TRIED, quick=(0,)
    )  # fmt: skip
    return max(0.0, statistics.mean(steps[1:]) - Pace(_TRIED, even=True).step(MICRO_BATCHES))


def _run(cluster: EmulatedCluster, name: str, folder: Path, seconds: float) -> Sequence[float]:
    quick = quick_steps(VARIANTS[name])
    return train(
        cluster, VARIANTS[name], folder, steps=quick[-1] + 2, micro_batches=MICRO_BATCHES, seconds=seconds,
        quick=quick, report=True,
    )  # fmt: skip


def _told(seconds: dict[str, float], even: float, folder: Path) -> str:
    """What each balancer gained and why, in a sentence each."""
    history = read_history(folder / "all" / "report")
    first, *_ = history.timelines[-1].layers.values()
    uneven = {each.balancer: each for each in gains(history, history.iterations[-1:])}
    before = {name: each.before for name, each in uneven.items()} | {"sequences": _attention()}
    gain = {name: seconds["none"] / each for name, each in seconds.items()}
    why = {
        "layers": f"{FROZEN} frozen layers have no backward pass, so the first stage takes {len(first)} of {LAYERS} "
        "layers; the slowest stage goes from",
        "sequences": "documents are cut and spread, so the attention of the fullest rank goes from",
        "experts": "hot experts get replicas, so the tokens of the busiest rank go from",
    }
    lines = [
        f"{name} alone, {gain[name]:.2f}x: {why[name]} {before[name]:.2f} to {uneven[name].after:.2f} times the mean."
        for name in _ALONE
    ]
    share = seconds["limit"] / seconds["all"]
    lines += [
        f"all three, {gain['all']:.2f}x of at most {gain['limit']:.2f}x: {share:.0%} of the pace of even work.",
        f"Of the limit's step this machine's own work was {1 - even / seconds['limit']:.1%}.",
    ]
    return "\n".join(lines)


def _attention() -> float:
    """max / mean of the ranks' attention where Megatron-LM's scheduler of packed documents spreads them."""
    from balancing.cluster import Cluster
    from balancing.sequences import AttentionShape
    from benchmarks.baselines.sequences import plan_sequences

    cluster = replace(Cluster.preset("a800-4x200g"), nodes=2, ranks_per_node=2, nics_per_node=1)
    shape = AttentionShape(hidden=32, heads=1, kv_heads=1, layers=LAYERS, ffn_hidden=32)
    return imbalance(plan_sequences(lengths_of(False), cluster, shape=shape, method="hybrid").area)

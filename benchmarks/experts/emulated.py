"""Step time with hot experts on an emulated cluster, by planner, against forced balance.

    python -m benchmarks.experts.emulated [--quick] [--trace FILE] [--ranks 8|16] [--json FILE]
    python -m benchmarks.experts.emulated --ranks 16 --micro-batches 8     # beyond even routing
    python -m benchmarks.experts.emulated --ranks 8 --nodes 1 --drift 0.25    # late copies

Each step has four layers of attention and experts and four micro-batches (--micro-batches: that many, with few
methods), on 8 and on 16 processes of an emulated cluster of two nodes. Tokens, weights of replicas and their gradients
are really sent, through Megatron's dispatcher and `balancing.experts.engine.slots`; compute is a timed wait.
`benchmarks.experts.emulated_workload` describes the machine and the model that are emulated, and their scale. Loads are
recorded (--trace, for `balancing.experts.trace`) or synthetic.

Methods take turns step by step, so that they run under the same conditions. The ceiling, "forced balance", is
Megatron's own layer with the same number of tokens spread equally over experts; "none" is Megatron's own layer, too.
Replicas are placed from the record before and tokens are divided by the true counts, as in training. All planners have
the same slots, relayed and overlapped transfers, and one transfer an iteration; they differ in placement and split.
Planning is timed beforehand; in training, a thread plans during the last micro-batch's passes, which take longer, so
that planning delays no step.

Not to scale: bandwidth within a node is not limited, transfers there cost CPU time, and so do latencies and the host's
work; a NIC passes the first 2 ms of a burst at once. Since ranks share cores, the host's work would weigh too much;
compute is slowed down until the work of a rank weighs about as much as with a core of its own (`EXPERT_SECONDS`).

Takes about 20 minutes on two idle cores, with --quick one minute.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from balancing.experts import TransferWindow
from balancing.experts.config import ExpertConfig
from balancing.experts.late import late_tokens
from balancing_tools.load_trace import read_load_trace
from benchmarks.baselines.experts import plan_replicas
from benchmarks.command import exit_code, load_before, parser, write_rows
from benchmarks.emulated import EmulatedCluster
from benchmarks.emulated.rate import format_rate
from benchmarks.experts.emulated_rank import Variant
from benchmarks.experts.emulated_workload import HIDDEN, SHAPE, TOP_K, Loads, Scale, made_up_loads, recorded_loads

__all__ = ["CEILING", "EXPERT_SECONDS", "VARIANTS", "Row", "measure", "measure_all"]

_TIMEOUT = 3600.0  # seconds for one launch of ranks
EXPERT_SECONDS = {8: 0.12, 16: 0.24}  # by number of ranks, which share two cores
_PIECES = 16  # of an expert's weights; a real one has 21

CEILING = "forced balance"


VARIANTS = {
    variant.name: variant
    for variant in (
        Variant(CEILING, even=True),
        Variant("quota on even load", "quota", even=True),  # next to what it is compared with
        Variant("none"),
        Variant("shadow", "shadow", knows="exposed"),
        Variant("shadow, 8 slots", "shadow", slots=8, knows="exposed"),
        Variant("prophet", "prophet"),
        Variant("prophet, 8 slots", "prophet", slots=8),
        Variant("eplb", "eplb", knows="balance"),
        Variant("eplb, 8 slots", "eplb", slots=8, knows="balance"),
        Variant("quota", "quota"),
        Variant("quota, late copies", "quota", late=1),
        Variant("quota, whole transfers", "quota", posting="whole"),
        Variant("quota, transfers in parts", "quota", posting="parts"),
    )
}
_QUICK = (CEILING, "none", "shadow", "prophet", "eplb", "quota")
_MOST_RANKS = (CEILING, "quota on even load", *_QUICK[1:])  # variants of quota run on 8 ranks only
_DRIFTING = (CEILING, "none", "quota", "quota, late copies")
_BEYOND = (CEILING, "none", "quota", "quota, whole transfers")
_NOTES = {
    "quota on even load": "overhead where nothing is to gain",
    "quota, late copies": "one late slot a rank",
    "quota, whole transfers": "also beside exchanges of tokens",
    "quota, transfers in parts": "also the gradients of the first layer",
}


@dataclass(frozen=True)
class Row:
    """One method on one number of ranks; medians over steps.

    seconds: step time.
    speedup: step time without replicas over `seconds`, step by step.
    of_ceiling: step time of the ceiling over `seconds`, step by step.
    exposed: seconds for which a rank waited for transfers of replicas, the largest of all ranks.
    imbalance: tokens of the busiest rank over the mean.
    planning: seconds of planning on this host, an iteration.
    sent_bytes: emulated bytes of weights and gradients that a rank sent, the largest of all ranks.
    steps: number of steps.
    """

    ranks: int
    method: str
    seconds: float
    speedup: float
    of_ceiling: float
    exposed: float
    imbalance: float
    planning: float
    sent_bytes: float
    steps: int


def _placements(plan: Variant, loads: Loads, scale: Scale) -> tuple[np.ndarray, np.ndarray, str]:
    """Slots int [step, layer, rank, slot], seconds of planning [step], and how tokens are split."""
    before = loads.even.before if plan.even else loads.before
    costs: dict[str, Any] = {}
    gate = {"min_gain": ExpertConfig().min_gain}  # for peers as well
    hidden = scale.attention_seconds if plan.knows == "hidden" else None
    slots, seconds, split = [], [], "level"
    for step in before:
        begin = time.thread_time()
        placed = []
        for load in np.rint(step.mean(2) * scale.tokens).astype(np.int64).swapaxes(0, 1):
            if plan.knows != "balance":
                window = TransferWindow(hidden, not placed, before.shape[3])
                costs = {"shape": SHAPE, "window": window}
            each = plan_replicas(load, scale.cluster, slots=plan.slots, method=plan.planner, **gate, **costs)
            split = each.split if each.replicas else split
            placed.append(each.slot_expert)
        seconds.append(time.thread_time() - begin)
        slots.append(placed)
    return np.array(slots), np.array(seconds), split


def measure(
    loads: Loads, scale: Scale, variants: Sequence[Variant], *, limited: bool = True, timeout: float = _TIMEOUT
) -> tuple[list[Row], str | None]:
    """Run the variants, among them the ceiling and "none"; returns a row for each, and why NICs were not limited.

    limited: whether NICs shall be. Raises RankFailed and RunTimeout.
    """
    (rows,), reason = measure_all([(loads, variants)], scale, limited=limited, timeout=timeout)
    return rows, reason


def measure_all(
    jobs: Sequence[tuple[Loads, Sequence[Variant]]], scale: Scale, *, limited: bool = True, timeout: float = _TIMEOUT
) -> tuple[list[list[Row]], str | None]:
    """`measure` of several models by the same processes, one after the other: a row for each variant of each."""
    planning = []
    shape = {"nics_per_node": scale.cluster.nics_per_node, "nic": scale.nic if limited else None}
    size = scale.nodes, scale.per_node
    with (
        tempfile.TemporaryDirectory() as folder,
        EmulatedCluster(*size, **shape) as cluster,
    ):
        folders = [Path(folder, str(number)) for number in range(len(jobs))]
        for path, (loads, variants) in zip(folders, jobs, strict=True):
            path.mkdir()
            planning.append(_write(path, loads, scale, variants))
        program = ["ignore", "-m", "benchmarks.experts.emulated_rank", *map(str, folders)]
        run = cluster.run("-W", program, timeout=timeout, on_line=_tell)
        reason = cluster.not_shaped_because
    lines = [json.loads(line) for line in run.output[0] if line.startswith('{"variant"')]
    return [
        [_row(variant, [line for line in lines if line["job"] == number], scale, planned) for variant in variants]
        for number, ((_, variants), planned) in enumerate(zip(jobs, planning, strict=True))
    ], reason


def _write(folder: Path, loads: Loads, scale: Scale, variants: Sequence[Variant]) -> dict[str, np.ndarray]:
    """Write what ranks read of one model; returns the seconds of planning, [step] by name."""
    arrays = {"recorded": loads.now, "even": loads.even.now}
    split, planning = {}, {}
    for each in variants:
        if each.planner is not None:
            arrays[f"slots of {each.name}"], planning[each.name], split[each.name] = _placements(each, loads, scale)
    job = {
        "layers": loads.now.shape[2],
        "experts": scale.experts,
        "top_k": TOP_K,
        "hidden": HIDDEN,
        "weights": round(SHAPE.parameters / scale.bytes),
        "tile": scale.tile,
        "token_seconds": scale.expert_seconds / scale.assignments,
        "attention_seconds": scale.attention_seconds * scale.time,
        "expert_share": scale.expert_seconds / (scale.expert_seconds + scale.attention_seconds * scale.time),
        "piece_bytes": -(-round(SHAPE.weight_bytes / scale.bytes) // _PIECES),
        "ranks_per_node": scale.cluster.ranks_per_node,
        "nics_per_node": scale.cluster.nics_per_node,
        "split": split,
        "late_least": round(late_tokens(scale.cluster, SHAPE, same_node=scale.nodes == 1) / scale.tokens),
        "variants": [asdict(variant) for variant in variants],
    }
    Path(folder, "job.json").write_text(json.dumps(job))
    np.savez(Path(folder, "loads.npz"), **arrays)
    return planning


def _tell(rank: int, line: str) -> None:
    """Print that a step has been measured."""
    if line.startswith('{"variant"'):
        done = json.loads(line)
        print(f"step {done['step'] + 1}, {done['variant']}: {done['seconds']:.2f} s", file=sys.stderr, flush=True)


def _row(variant: Variant, lines: list[dict[str, Any]], scale: Scale, planning: dict[str, np.ndarray]) -> Row:
    def values(key: str, name: str = variant.name) -> np.ndarray:
        return np.array([line[key] for line in lines if line["variant"] == name])

    own, none = values("seconds"), values("seconds", "none")
    return Row(
        ranks=scale.ranks,
        method=variant.name,
        seconds=float(np.median(own)),
        speedup=float(np.median(none / own)) if len(none) else 0.0,
        of_ceiling=float(np.median(values("seconds", CEILING) / own)),
        exposed=float(np.median(values("exposed"))),
        imbalance=float(np.mean(values("imbalance"))),
        planning=float(np.median(planning[variant.name])) if variant.planner else 0.0,
        sent_bytes=float(np.median(values("sent_bytes"))),
        steps=len(own),
    )


def _print(rows: Sequence[Row], scale: Scale, reason: str | None) -> None:
    limited = "loopback, NICs not limited: " + reason if reason else f"NICs of {format_rate(scale.nic)}"
    print(
        f"\nemulated: {scale.nodes} nodes x {scale.per_node} ranks, {scale.cluster.nics_per_node} NICs a node; "
        f"{scale.time:.2f} times slower than modelled, 1/{scale.bytes:.0f} of its bytes; {limited}"
    )
    print(f"{'method':20}  s/step  x none  of ceiling  max/mean    exposed   planning  steps")
    for row in rows:
        times = f"{row.exposed * 1e3:8.1f} ms {row.planning * 1e3:7.1f} ms"
        figures = f"{row.seconds:6.3f}  {row.speedup:6.2f}  {row.of_ceiling:10.1%}  {row.imbalance:8.3f} {times}"
        print(f"{row.method:20}  {figures}  {row.steps:5}  {_NOTES.get(row.method, '')}".rstrip(), flush=True)


def _print_targets(rows: Sequence[Row], micro_batches: int | None, drift: float | None) -> None:
    found = {row.method: row for row in rows}
    if drift:
        over = 1 / found["quota, late copies"].of_ceiling
        print(f"  {'met   ' if over <= 1.03 else 'MISSED'}  with late copies at most 1.03 of even routing: {over:.3f}")
        return
    if micro_batches:
        least, share = 1.03 if micro_batches >= 8 else 0.99, found["quota"].of_ceiling
        met = "met   " if share >= least else "MISSED"
        print(f"  {met}  quota at {least:.0%} of forced balance or more: {share:.1%}")
        return
    quota, overhead = found["quota"], found.get("quota on even load")
    checks = [
        ("quota at 97 % of the ceiling or more", f"{quota.of_ceiling:.1%}", quota.of_ceiling >= 0.97),
        ("quota ahead of prophet", f"{quota.seconds:.3f} s", quota.seconds < found["prophet"].seconds),
        (
            "prophet ahead of shadow",
            f"{found['prophet'].seconds:.3f} s",
            found["prophet"].seconds < found["shadow"].seconds,
        ),
    ]
    if overhead:
        cost = 1 / overhead.of_ceiling - 1
        checks.append(("quota costs at most 0.5 % on an even load", f"{cost:.2%}", cost <= 0.005))
    for text, value, met in checks:
        print(f"  {'met   ' if met else 'MISSED'}  {text}: {value}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code: 1 where ranks failed, 2 for bad input."""
    options_of = parser("experts.emulated", __doc__, "8 ranks, fewer methods, layers and steps; under a minute")
    options_of.add_argument("--trace", metavar="FILE", help="recorded loads, an .npz file; synthetic by default")
    options_of.add_argument("--ranks", type=int, choices=(8, 16), help="only this number of ranks; both by default")
    options_of.add_argument(
        "--micro-batches", type=int, choices=(1, 2, 4, 8, 16), metavar="N",
        help="micro-batches of a step: 1, 2, 4, 8 or 16; with few methods",
    )  # fmt: skip
    options_of.add_argument(
        "--drift", type=float, metavar="SHARE",
        help="share of the tokens of made-up loads that change experts from one step to the next; with few methods",
    )  # fmt: skip
    options_of.add_argument("--nodes", type=int, choices=(1, 2), default=2, help="nodes of the ranks: 1 or 2 (2)")
    options = options_of.parse_args(arguments)
    return exit_code("experts_emulated", lambda: _run(options))


def _run(options: argparse.Namespace) -> int:
    numbers = [options.ranks] if options.ranks else [8] if options.quick else [8, 16]
    layers, micro_batches, steps = (2, 2, 1) if options.quick else (4, 4, 3)
    micro_batches = options.micro_batches or micro_batches
    about, load = "recorded loads" if options.trace else "made-up loads", load_before()
    rows: list[Row] = []
    scales: list[dict[str, float]] = []
    print(f"emulated cluster, no GPU; {load}; {about}", flush=True)
    trace = read_load_trace(options.trace) if options.trace else None
    made_up = {"drift": options.drift} if options.drift else {}
    for ranks in numbers:
        scale = Scale(ranks, trace.counts.shape[-1] if trace else 32, EXPERT_SECONDS[ranks], options.nodes)
        size = (scale, layers, micro_batches, steps)
        names = _QUICK if options.quick else _MOST_RANKS if ranks == 16 else VARIANTS
        names = _BEYOND if options.micro_batches else _DRIFTING if options.drift else names
        variants = [VARIANTS[name] for name in names]
        loads = recorded_loads(trace, *size) if trace else made_up_loads(*size, **made_up)
        found, reason = measure(loads, scale, variants)
        _print(found, scale, reason)
        _print_targets(found, options.micro_batches, options.drift)
        rows += found
        scales.append({"ranks": ranks, "time": scale.time, "bytes": scale.bytes, "nic": scale.nic})
    write_rows(options.json, rows, loads=about, load=load, scales=scales)
    return 0


if __name__ == "__main__":
    sys.exit(main())

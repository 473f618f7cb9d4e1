"""Step time with documents of very different length, by method and beside the physical limit; emulated.

    python -m benchmarks.sequences.emulated [--quick] [--cluster "2 x 8"|"4 x 4"] [--samples] [--host-free] ...

One layer, forward and backward, of one micro-batch with 4k tokens a rank (Zeppelin's regime), on 16 processes of an
emulated cluster with fewer NICs than ranks. Keys, values, gradients and remapped tokens really move, through
`balancing.sequences`; compute is a timed wait. `benchmarks.sequences.emulated_workload` says what machine and models
this stands for and how it is scaled, `benchmarks.sequences.emulated_rank` how every step checks itself.

All methods take turns, batch by batch, so that they see the same machine. ring stands for Transformer Engine's p2p,
all-gather for Llama 3's and Megatron-LM's, in two levels over all network cards, a2a+p2p for Transformer Engine's
hierarchical context parallelism (`benchmarks.sequences.peers`), hybrid for Megatron-LM's hybrid context parallelism,
planned by its own scheduler; none of them is routed. The limit is arithmetic: the batch's exact FLOPs spread evenly,
every transfer hidden. "model" is what `balancing.sequences.step_cost` predicts, or `benchmarks.sequences.peers`. Plans
are made before, as in training.

Not to scale: within a node bytes are not limited and cost what CPU they cost, as the engine's work on the host does; a
NIC lets the first 2 ms of a burst pass at once. The host's work would count as often as ranks share a core, so the
machine is slowed down until it weighs little (`_TIME`).

Operations of our engine cost the host what `balancing.cluster.presets` says, in slow motion like compute: the host runs
ahead of the device, and a step takes as long as the slower of both. What operations cost the hosts of other systems is
not known, so theirs are free. With --host-free ours are, too, as in figures from before 2026-11-26.

With --samples the 16 ranks are data-parallel: each draws a packed sample of 32k tokens of its own. Attention is
computed where the tokens were drawn, or balanced with the tokens left there, or tokens move for all layers ("chunks").

Takes about 17 minutes on two idle cores, with --quick about two. Exit code 1 if a target is missed.
"""

import argparse
import json
import pickle
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from balancing.sequences import limit_seconds
from benchmarks.command import exit_code, load_before, parser, write_rows
from benchmarks.emulated import EmulatedCluster
from benchmarks.emulated.rate import format_rate
from benchmarks.sequences.emulated_rank import Job
from benchmarks.sequences.emulated_workload import (
    CLUSTERS,
    CONTEXT_METHODS,
    DATA_METHODS,
    METHODS,
    SHAPES,
    Case,
    Scale,
    make_case,
    predicted_seconds,
)

__all__ = ["Row", "measure", "measure_rows"]

_TIMEOUT = 3600.0  # seconds for one launch of ranks
_TIME = 100.0  # emulated seconds for each modelled one
_SAMPLE, _SAMPLE_TIME = 32768, 25.0  # tokens of a rank and emulated seconds for --samples

_DISTRIBUTIONS = ("prolong", "packed", "mix")
_QUICK_METHODS = ("ring", "all-gather", "a2a+p2p", "hybrid", "zones", "chunks")
_AIM_RING = 2.8
_NOISE = 1.03  # steps that take as long differ by so much here


@dataclass(frozen=True)
class Row:
    """One method on one cluster, model and distribution; means over batches.

    seconds: emulated, of a step. speedup: the seconds of the first method over these, batch by batch; it is ring, or as
    drawn. to_limit: these over the physical limit. model: to_limit as the cost model predicts it. exposed: part of the
    step for which the rank that waited longest waited for transfers, other ranks' lateness included.
    """

    cluster: str
    model: str
    distribution: str
    method: str
    seconds: float
    speedup: float
    to_limit: float
    predicted: float
    exposed: float
    batches: int


def measure(job: Job, *, limited: bool = True, timeout: float = _TIMEOUT) -> tuple[list[dict[str, Any]], str | None]:
    """Run the job; returns the lines that the ranks wrote, and why NICs were not limited.

    limited: whether NICs shall be. Raises RankFailed and RunTimeout.
    """
    scale = job.scale
    nics, nic = scale.cluster.nics_per_node, scale.nic if limited else None
    emulated = EmulatedCluster(scale.nodes, scale.ranks_per_node, nics_per_node=nics, nic=nic)
    with tempfile.TemporaryDirectory() as folder, emulated as cluster:
        path = Path(folder, "job.pickle")
        path.write_bytes(pickle.dumps(job))
        program = ["ignore", "-m", "benchmarks.sequences.emulated_rank", str(path)]
        run = cluster.run("-W", program, timeout=timeout, on_line=partial(_tell, job))
        reason = cluster.not_shaped_because
    return [json.loads(line) for line in run.output[0] if line.startswith("{")], reason


def _tell(job: Job, rank: int, line: str) -> None:
    """Say that a step has been measured."""
    if line.startswith("{") and "case" in (done := json.loads(line)):
        case = job.cases[done["case"]]
        about = f"{case.model}, {case.distribution}, {done['method']}"
        print(f"{about}: {done['seconds']:.2f} s", file=sys.stderr, flush=True)


def measure_rows(
    name: str,
    scale: Scale,
    methods: Sequence[str],
    models: Sequence[str],
    distributions: Sequence[str] = _DISTRIBUTIONS,
) -> list[Row]:
    """Run these methods, "ring" among them, on one batch of each model and distribution. name: of the cluster."""
    planned = [METHODS[method] for method in methods]
    cases = [make_case(scale.cluster, model, each, 0, planned) for model in models for each in distributions]
    job = Job(scale, 1, tuple(methods), tuple(cases))
    return make_rows(name, job, measure(job)[0])


def make_rows(name: str, job: Job, lines: Iterable[dict[str, Any]]) -> list[Row]:
    """What was measured, by model, distribution and method. name: of the cluster."""
    found = {(line["case"], line["method"]): line for line in lines if "case" in line}
    rows = []
    groups = dict.fromkeys((case.model, case.distribution) for case in job.cases)
    for model, distribution in groups:
        for method in job.methods:
            ran = [
                (case, found[number, method], found[number, job.methods[0]])
                for number, case in enumerate(job.cases)
                if (case.model, case.distribution) == (model, distribution) and (number, method) in found
            ]
            if ran:
                rows.append(_row(name, job, method, ran))
    return rows


def _row(name: str, job: Job, method: str, ran: Sequence[tuple[Case, dict[str, Any], dict[str, Any]]]) -> Row:
    cluster = job.scale.cluster
    first = ran[0][0]
    shape = SHAPES[first.model]
    alone = replace(cluster, rates=None)  # arithmetic
    limits = np.array([limit_seconds(case.lengths, alone, shape) for case, *_ in ran]) * job.layers / shape.layers
    seconds, ring, exposed = np.array([(own["seconds"], ring["seconds"], own["exposed"]) for _, own, ring in ran]).T
    predicted = np.array([predicted_seconds(case, METHODS[method], cluster) for case, *_ in ran]) * job.layers
    return Row(
        cluster=name,
        model=first.model,
        distribution=first.distribution,
        method=method,
        seconds=float(seconds.mean()),
        speedup=float((ring / seconds).mean()),
        to_limit=float((seconds / (limits * job.scale.time)).mean()),
        predicted=float((predicted / shape.layers / limits).mean()),
        exposed=float((exposed / seconds).mean()),
        batches=len(ran),
    )


def _print(name: str, job: Job, rows: Sequence[Row], reason: str | None) -> None:
    limited = "loopback, NICs not limited: " + reason if reason else f"NICs of {format_rate(job.scale.nic)}"
    cluster = job.scale.cluster
    print(
        f"\nemulated: {name} ranks, {cluster.nics_per_node} NICs a node; {job.scale.time:g} times slower than "
        f"modelled, 1/{job.scale.bytes:g} of its bytes; {limited}; {'with' if job.scale.host else 'without'} the host"
    )
    print(f"{'model':8} {'documents':10} {'method':20}  s/step x first  / limit   model  exposed  batches")
    before = None
    for row in rows:
        if before not in (None, (row.model, row.distribution)):
            print()
        before = (row.model, row.distribution)
        figures = (
            f"{row.seconds:6.2f}  {row.speedup:6.2f}  {row.to_limit:7.3f} {row.predicted:7.3f}  {row.exposed:7.0%}"
        )
        print(f"{row.model:8} {row.distribution:10} {row.method:20}  {figures}  {row.batches:7}", flush=True)


def targets(rows: Sequence[Row]) -> list[tuple[str, str, bool]]:
    """What was promised, what came out, and whether that is enough."""
    gains = [row.speedup for row in rows if (row.model, row.method) == ("MHA", "chunks")]
    checks = []
    if gains:
        gain = float(np.mean(gains))
        checks.append((f"chunks {_AIM_RING} times faster than ring, mean over MHA", f"{gain:.2f}", gain >= _AIM_RING))
    chunks = {(row.cluster, row.model, row.distribution): row.seconds for row in rows if row.method == "chunks"}
    if chunks:
        worst, row = max(
            (chunks[row.cluster, row.model, row.distribution] / row.seconds, row)
            for row in rows
            if row.method != "chunks"
        )
        text = f"{worst:.3f} times as long as {row.method} on {row.distribution}, {row.model}, {row.cluster}"
        checks.append((f"chunks slower than no other, up to {_NOISE - 1:.0%}", text, worst <= _NOISE))
    return checks


def _job(name: str, quick: bool, samples: bool, host: bool) -> Job:
    nodes, per_node = CLUSTERS[name]
    scale = Scale(nodes, per_node, _SAMPLE_TIME if samples else _TIME, host=host)
    methods = DATA_METHODS if samples else _QUICK_METHODS if quick else CONTEXT_METHODS
    drawn = {"tokens": _SAMPLE} if samples else {}
    cases = [
        make_case(scale.cluster, model, distribution, batch, [METHODS[each] for each in methods], **drawn)
        for model in SHAPES
        for distribution in (_DISTRIBUTIONS[:1] if quick else _DISTRIBUTIONS)
        for batch in range(1)
    ]
    return Job(scale, 1, methods, tuple(cases))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code: 1 where ranks failed or a target was missed."""
    options_of = parser("sequences.emulated", __doc__, "one cluster and distribution, fewer methods; two minutes")
    add = options_of.add_argument
    add("--cluster", choices=list(CLUSTERS), help="only this one; both by default")
    add("--samples", action="store_true", help="data-parallel ranks, each with a sample of 32k tokens")
    add("--host-free", action="store_true", help="operations of the engine cost the host nothing")
    options = options_of.parse_args(arguments)
    return exit_code("sequences_emulated", lambda: _run(options))


def _run(options: argparse.Namespace) -> int:
    names = [options.cluster] if options.cluster else list(CLUSTERS)[:1] if options.quick else list(CLUSTERS)
    rows: list[Row] = []
    load = load_before()
    print(f"emulated cluster, no GPU; {load}", flush=True)
    for name in names:
        job = _job(name, options.quick, options.samples, not options.host_free)
        lines, reason = measure(job)
        found = make_rows(name, job, lines)
        _print(name, job, found, reason)
        rows += found
    checks = targets(rows)
    print()
    for text, value, met in checks:
        print(f"  {'met   ' if met else 'MISSED'}  {text}: {value}")
    write_rows(options.json, rows, load=load, time=_TIME)
    return 0 if all(met for *_, met in checks) else 1


if __name__ == "__main__":
    sys.exit(main())

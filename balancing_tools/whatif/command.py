"""python -m balancing.whatif: forecast a job's step without balancing, with each balancer and with all of them.

The forecast is made from a recorded run (DIR of --balance-report), or from Megatron-LM's flags after --, with --cluster
and --gpus. Nothing is trained and no GPU is needed. The last lines say how far to trust the figures.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from balancing.cluster import PRESETS, Cluster
from balancing.command_line import Parser, whole_number
from balancing.files import check_output, read_arrays, write_text
from balancing.kernels.choice import KERNELS, planned_kernels
from balancing.report import read_history, report_files
from balancing.report.units import duration, share
from balancing_tools.load_trace import LoadTrace, read_load_trace
from balancing_tools.whatif.forecast import Forecast, forecast, verdict
from balancing_tools.whatif.gains import ROUTING
from balancing_tools.whatif.job import read_flags
from balancing_tools.whatif.lengths import DISTRIBUTIONS
from balancing_tools.whatif.recorded import forecast_recorded
from balancing_tools.whatif.step import FITTED_ERROR

__all__ = ["main"]

_HEAD = ("GPUs", "balancer", "step", "saves", "bubble", "layers", "sequences", "experts", "memory", "GPU-hours")
_MOCK = (
    "The skew of experts is that of --routing. Do not take it from training on mock tokens: they overstate it, up to "
    "2.35 times in the Gini coefficient. On real text the coefficient is 0.105 to over 0.24 (DODOCO, arXiv 2605.20982)."
)
_ROUTING = "dodoco-mha"
_MOST = 10**9  # iterations
_MOST_GPUS = 10**6
_WIDTH = 100
_TRAY = 4  # GPUs of a host in a rack


def _parser() -> Parser:
    description, _, more = (__doc__ or "").partition("\n\n")
    parser = Parser(
        prog="python -m balancing.whatif", description=description, epilog=more,
        usage="%(prog)s [-h] [options] (DIR | -- FLAGS OF MEGATRON-LM)",
    )  # fmt: skip
    parser.add_argument("directory", metavar="DIR", type=Path, nargs="?", help="the directory of --balance-report")
    parser.add_argument("--cluster", metavar="NAME|FILE", help="preset, or file of python -m balancing.cluster")
    parser.add_argument("--gpus", metavar="N[,N...]", help="numbers of GPUs (default: as recorded)")
    parser.add_argument(
        "--lengths", metavar="NAME|FILE",
        help=f"lengths of documents that are masked from each other: {', '.join(DISTRIBUTIONS)}, or an .npz or .npy "
        "file (default: one document a sequence)",
    )  # fmt: skip
    parser.add_argument(
        "--routing", metavar="NAME|FILE",
        help=f"skew of experts: {', '.join(ROUTING)}, or an .npz file of recorded loads (default: {_ROUTING})",
    )  # fmt: skip
    parser.add_argument(
        "--iterations", type=whole_number(1, _MOST), metavar="N", help="steps of the training (default: the job's)"
    )
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the forecasts")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code, as `balancing.command_line` says."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    at = given.index("--") if "--" in given else len(given)
    parser = _parser()
    return parser.run(lambda options: _show(parser, options, given[at + 1 :]), given[:at])


def _show(parser: Parser, options: argparse.Namespace, flags: list[str]) -> None:
    if options.directory is not None:
        parser.refuse_unused(options, "on a recorded run", "--cluster", "--lengths", "--routing")
    inputs = _inputs(options)
    if options.json is not None:
        check_output(options.json, inputs)
    title, groups, notes = _forecasts(options, flags)
    verdicts = [verdict(group) for group in groups]
    _print(title, groups, verdicts, notes)
    if options.json is not None:
        content = {"title": title, "verdicts": verdicts, "forecasts": [asdict(one) for g in groups for one in g]}
        write_text(options.json, json.dumps(content, indent=2) + "\n", inputs)


def _inputs(options: argparse.Namespace) -> list[Path]:
    """The files that the forecast is read from. Names of presets and distributions may be among them."""
    names = [options.cluster, options.lengths, options.routing]
    recorded = [] if options.directory is None else report_files(options.directory)
    return [*recorded, *(Path(name) for name in names if name)]


def _forecasts(options: argparse.Namespace, flags: list[str]) -> tuple[str, list[list[Forecast]], list[str]]:
    """The title, the forecasts for each number of GPUs, and notes."""
    if (options.directory is not None) == bool(flags):
        raise ValueError("give either DIR or Megatron-LM's flags after --")
    gpus = _numbers(options.gpus)
    if options.directory is not None:
        groups, notes = forecast_recorded(read_history(options.directory), gpus, options.iterations)
        return options.directory.resolve().name, groups, notes
    if options.cluster is None:
        raise ValueError(f"which machine? give --cluster: {', '.join(PRESETS)}, or a file")
    job = read_flags(flags)
    if not gpus:
        raise ValueError("how many GPUs? give --gpus N[,N...]")
    if options.routing is not None and not job.num_experts:
        raise ValueError(f"--routing {options.routing} has no effect on a model without experts; drop it")
    if options.iterations is not None and job.freeze_layers:
        raise ValueError(
            f"--iterations {options.iterations} has no effect with --freeze-layers {job.freeze_layers}: steps before "
            "layers are frozen take longer; drop one"
        )
    lengths = None if options.lengths is None else _lengths(options.lengths)
    routing: str | LoadTrace = options.routing or _ROUTING
    if options.routing is not None and options.routing not in ROUTING and options.routing.endswith(".npz"):
        routing = read_load_trace(options.routing)
    kernels = planned_kernels(job.attention_backend)
    groups, refused, capacity = [], [], None
    for number in gpus:
        try:
            # A job that does not fit one number of GPUs may fit another. It is an error if it fits none.
            on = job if job.global_batch_size is not None else job.on(gpus[0])  # sets the global batch
            on, cluster = on.on(number), _cluster(options.cluster, number).with_kernel(*kernels)
        except ValueError as error:
            refused.append(f"Left out: {number:,} GPUs. {error}.")
            continue
        capacity = cluster.memory
        groups.append(forecast(on, cluster, lengths=lengths, routing=routing))
        if options.iterations is not None:
            groups[-1] = [_hours(one, options.iterations) for one in groups[-1]]
    if not groups:
        raise ValueError(refused[0].removeprefix("Left out: ").rstrip("."))
    notes = [*refused, f"The balanced step is a model fitted to published runs; {FITTED_ERROR}."]
    if lengths is not None and cluster.rates is not None:
        kernel = KERNELS.get(cluster.rates.kernel, cluster.rates.kernel)
        notes.append(f"Documents are spread for the rates of {kernel}; --attention-backend names another kernel.")
    if job.vocab_size is None:
        notes.append(f"--vocab-size is not given; a vocabulary of {job.vocabulary:,} is assumed.")
    if job.num_experts:
        notes.append(_MOCK)
    if job.freeze_layers:
        notes.append(f"The step is one in which all {job.freeze_layers} layers of --freeze-layers are frozen.")
    for group in groups:
        if (most := max(one.memory or 0.0 for one in group)) > (capacity or most):
            notes.append(f"On {group[0].gpus:,} GPUs {most / 1e9:.0f} GB a rank do not fit the device's "
                         f"{(capacity or 0) / 1e9:.0f} GB.")  # fmt: skip
    return f"the job on {options.cluster}", groups, notes


def _hours(one: Forecast, iterations: int) -> Forecast:
    return replace(one, gpu_hours=one.step_seconds * iterations * one.gpus / 3600)


def _numbers(text: str | None) -> list[int]:
    if text is None:
        return []
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"--gpus {text} is not a list of numbers, as in 64,256,1024") from None
    for number in found:
        if not 1 <= number <= _MOST_GPUS:
            raise ValueError(f"--gpus {number} must be from 1 to {_MOST_GPUS:,}")
    return found


def _cluster(text: str, gpus: int) -> Cluster:
    """The cluster of a job. A host in a rack has four GPUs."""
    rack = text in PRESETS and PRESETS[text]["gpus"] > 8
    per_node = _TRAY if rack else min(8, gpus) if text in PRESETS else None
    return Cluster.from_spec(text, gpus, ranks_per_node=per_node)


def _lengths(text: str) -> str | np.ndarray:
    """The name of a distribution, or the first array of a file."""
    if text in DISTRIBUTIONS:
        return text
    if not text.endswith((".npz", ".npy")):
        raise ValueError(f"unknown --lengths {text!r}; known: {', '.join(DISTRIBUTIONS)}, or an .npz or .npy file")
    name, array = next(iter(read_arrays(text).items()), ("", np.zeros(0)))
    if array.ndim != 1 or not array.size or array.dtype.kind not in "iuf":
        raise ValueError(f"--lengths {text}: array {name!r} has shape {array.shape} of {array.dtype}; give a row of "
                         "numbers, the tokens of each document")  # fmt: skip
    return array


def _rows(groups: Sequence[Sequence[Forecast]]) -> list[list[str]]:
    rows = []
    for group in groups:
        none = group[0].step_seconds
        for one in group:
            hours = "" if one.gpu_hours is None else f"{one.gpu_hours:,.0f}"
            memory = "" if one.memory is None else f"{one.memory / 1e9:.0f} GB"
            saves = "" if one.balancer == "none" else "off" if one.off else share(1 - one.step_seconds / none)
            rows.append([
                f"{one.gpus:,}", one.balancer, duration(one.step_seconds), saves, share(one.bubble),
                f"{one.layers:.2f}", f"{one.sequences:.2f}", f"{one.experts:.2f}", memory, hours,
            ])  # fmt: skip
    return rows


def _off(groups: Sequence[Sequence[Forecast]]) -> list[str]:
    reasons: dict[str, None] = {}
    for group in groups:
        for one in group:
            if one.off:
                reasons[f"{one.balancer}: {one.off}"] = None
    return ["Off: " + "; ".join(reasons) + "."] if reasons else []


def _print(title: str, groups: Sequence[Sequence[Forecast]], verdicts: Sequence[str], notes: Sequence[str]) -> None:
    console = Console(highlight=False, markup=False)
    if not console.is_terminal or console.width > _WIDTH:
        console.width = _WIDTH
    for sentence in verdicts:
        console.print(sentence, style="bold")
    console.print(f"({title}; a forecast, not a measurement)\n", style="dim")
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for name in _HEAD:
        table.add_column(name, justify="left" if name == "balancer" else "right")
    for row in _rows(groups):
        table.add_row(*row)
    console.print(table)
    console.print(
        "layers, sequences and experts are imbalance, max / mean, so 1.00 is perfect: of pipeline stages in time, of "
        "ranks that share micro-batches in attention, of expert-parallel ranks in tokens.",
        style="dim",
    )
    for note in (*_off(groups), *notes):
        console.print(note, style="dim")

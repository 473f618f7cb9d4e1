"""python -m balancing.experts --from-report DIR | --trace FILE: the gain of balanced experts, from recorded loads.

Replays the recorded loads of a run. As in training, each planner places replicas from one record and the next record is
split over them. With --cluster and the size of an expert, the tables also show the time of a layer by the cost model.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.console import Console
from rich.progress import track
from rich.table import Table

from balancing.cluster import Cluster
from balancing.command_line import Parser, real_number, whole_number
from balancing.experts.cost import ExpertShape, MoELayerCost, TransferWindow, layer_cost
from balancing.experts.load_history import total_variation
from balancing.experts.plan import METHODS, plan_replicas_layers
from balancing.experts.split.split import traffic
from balancing.files import check_output
from balancing.report import read_history, report_files
from balancing_tools.load_trace import LoadTrace, read_load_trace, read_reported_loads, write_load_trace

__all__ = ["main"]

_MOST = 1_000_000  # ranks, experts, slots, widths
_SLOTS = 2  # by default, as in training
_RECORDS = 32  # records that are replayed, spread over the run
_ANY = Cluster(1, 1, 1, 1.0, 1.0, 1.0, 1.0)  # its speeds are not used without a cost model


_size = whole_number(1, _MOST)


def _parser() -> Parser:
    description, _, more = (__doc__ or "").partition("\n\n")
    parser = Parser(prog="python -m balancing.experts", description=description, epilog=more)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--from-report", metavar="DIR", type=Path, help="the directory of --balance-report")
    source.add_argument("--trace", metavar="FILE", type=Path, help="an .npz file in the format of --save")
    add = parser.add_argument
    add("--ranks", type=_size, metavar="EP", help="expert-parallel ranks (default: as recorded)")
    add("--slots", type=whole_number(0, _MOST), metavar="N", help="most replicas on a rank, per layer (default: 2)")
    parser.add_argument(
        "--planner",
        choices=METHODS,
        default="quota",
        help="planner whose imbalance is shown layer by layer (default: quota)",
    )
    parser.add_argument("--cluster", metavar="NAME|FILE", help="preset, or file of python -m balancing.cluster --json")
    add("--hidden-size", type=_size, metavar="H", help="hidden size of the model; with --cluster")
    add("--moe-ffn-hidden-size", type=_size, metavar="F", help="inner width of an expert; with --cluster")
    parser.add_argument(
        "--non-expert-ms", type=real_number(0, 1e9), default=0.0, metavar="X",
        help="ms of a layer's forward compute outside the experts, which overlaps transfers (default: 0)",
    )  # fmt: skip
    parser.add_argument("--save", metavar="FILE", type=Path, help="write the loads to a compact .npz file")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Returns an exit code of `balancing.command_line`."""
    parser = _parser()

    def work(options: argparse.Namespace) -> None:
        if options.cluster is None:
            parser.refuse_unused(options, "without --cluster", "--hidden-size", "--moe-ffn-hidden-size",
                                 "--non-expert-ms")  # fmt: skip
        trace, inputs, unread = _read(options)
        if options.save is not None:
            check_output(options.save, inputs)
        text = _replayed(trace, options)
        if options.save is not None:
            write_load_trace(trace, options.save, inputs)
            print(f"wrote {options.save}")
        console = Console(highlight=False, markup=False, width=100)
        for part in text:
            console.print(part, soft_wrap=isinstance(part, str))
        if unread:
            print(unread)

    return parser.run(work, arguments)


def _read(options: argparse.Namespace) -> tuple[LoadTrace, list[Path], str]:
    """The loads, the files that are read for them and for the cluster, and what of the report was not used."""
    inputs = [Path(options.cluster)] if options.cluster is not None else []
    if options.from_report is not None:
        history = read_history(options.from_report)
        return read_reported_loads(history), [*inputs, *report_files(options.from_report)], history.unread
    return read_load_trace(options.trace), [*inputs, options.trace], ""


@dataclass(frozen=True)
class _Machine:
    """The inputs of planners beside loads.

    cluster: compute and link speeds.
    shape: size of an expert; None for plans without a cost model.
    slots: largest number of replicas on a rank.
    hidden_under: seconds of forward compute that overlap transfers.
    """

    cluster: Cluster
    shape: ExpertShape | None
    slots: int
    hidden_under: float


@dataclass(frozen=True)
class _Replay:
    """Results of one planner.

    imbalance: busiest rank over the mean, [record, layer, micro_batch].
    replicas: mean number of a layer's replicas.
    costs: [layer], means over records and micro-batches; empty without a cluster.
    """

    imbalance: np.ndarray
    replicas: float
    costs: list[MoELayerCost]


def _replayed(trace: LoadTrace, options: argparse.Namespace) -> list[str | Table]:
    """Replay the loads. Returns the texts and tables to print."""
    ranks = trace.counts.shape[1] if options.ranks is None else options.ranks
    counts = trace.on_ranks(ranks)
    records, _, layers, _, experts = counts.shape
    if records < 2:
        raise ValueError("there is only one record, and replicas are placed for the next; record at least 2 iterations")
    most = experts - experts // ranks
    if options.slots is not None and options.slots > most:
        raise ValueError(
            f"--slots {options.slots} must be at most {most}: of {experts} experts each of {ranks} ranks has "
            f"{experts // ranks} at home"
        )
    slots = min(_SLOTS, most) if options.slots is None else options.slots
    shape, cluster = _costs(options, ranks)
    machine = _Machine(cluster, shape, slots, options.non_expert_ms / 1e3)
    follow = np.unique(np.linspace(1, records - 1, min(_RECORDS, records - 1)).astype(int))
    replays: dict[str, _Replay] = {}
    methods = METHODS if options.planner == "quota" else (*dict.fromkeys(("none", options.planner)),)
    quiet = not sys.stderr.isatty()
    for method in track(methods, "planners", transient=True, console=Console(stderr=True), disable=quiet):
        replays[method] = _replay(counts, follow, method, machine)
    drift = np.mean([total_variation(*counts[record - 1 : record + 1].sum(3).swapaxes(1, 2)) for record in follow])
    apart = int(np.median(np.diff(trace.iteration)))
    facts = (
        f"{layers} MoE layers, {experts} experts, {ranks} expert-parallel ranks, {slots} slots a rank. "
        f"{records} records {apart} iteration(s) apart, {len(follow)} of them replayed. From one record to the next, "
        f"{drift:.1%} of the tokens change experts."
    )
    chosen = _layers(trace.layer, replays["none"], replays[options.planner], options.planner)
    return [facts, _planners(replays, with_costs=shape is not None), chosen]


def _costs(options: argparse.Namespace, ranks: int) -> tuple[ExpertShape | None, Cluster]:
    """The size of an expert (None without --cluster), and a cluster of at least `ranks` ranks."""
    sizes = options.hidden_size, options.moe_ffn_hidden_size
    if options.cluster is None:
        return None, replace(_ANY, ranks_per_node=ranks)
    if None in sizes:
        raise ValueError(f"--cluster {options.cluster} needs --hidden-size and --moe-ffn-hidden-size for costs")
    shape = ExpertShape(hidden=sizes[0], ffn_hidden=sizes[1], bytes_per_parameter=2)
    spec = options.cluster
    node = Cluster.from_json(spec) if spec.endswith(".json") else Cluster.preset(spec)
    return shape, node.relabel(-(-ranks // node.ranks_per_node), node.ranks_per_node)


def _replay(counts: np.ndarray, follow: np.ndarray, method: str, machine: _Machine) -> _Replay:
    """Place replicas from the record before each record of `follow`, and split that record over them.

    counts: as in `LoadTrace`.
    follow: int [record], numbers of the records to split.
    method: the planner.
    """
    cluster, shape = machine.cluster, machine.shape
    _, ranks, layers, micro_batches, _ = counts.shape
    window = None if shape is None else TransferWindow(machine.hidden_under, True, micro_batches)
    imbalance, replicas = np.ones((len(follow), layers, micro_batches)), 0
    seconds: list[list[MoELayerCost]] = [[] for _ in range(layers)]
    for number, record in enumerate(follow):
        before = counts[record - 1].mean(2).swapaxes(0, 1)
        plans = plan_replicas_layers(before, cluster, slots=machine.slots, shape=shape, window=window, method=method)
        for layer, plan in enumerate(plans):
            replicas += plan.replicas
            for batch in range(micro_batches):
                sent = traffic(counts[record, :, layer, batch], plan)
                imbalance[number, layer, batch] = sent.sum(0).max() / max(sent.sum() / ranks, 1)
                if shape is not None and window is not None:
                    own = replace(window, first=layer == 0)
                    seconds[layer].append(layer_cost(sent, plan, cluster, shape, own))
    mean = [_mean(layer_costs) for layer_costs in seconds] if shape is not None else []
    return _Replay(imbalance, replicas / (len(follow) * layers), mean)


def _mean(costs: list[MoELayerCost]) -> MoELayerCost:
    names = ("all_to_all", "forward", "trans", "agg", "trans_exposed", "agg_exposed", "slowed")
    means: dict[str, Any] = {name: float(np.mean([getattr(cost, name) for cost in costs])) for name in names}
    return replace(costs[0], **means)


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left", no_wrap=True)
    return table


def _planners(replays: dict[str, _Replay], *, with_costs: bool) -> Table:
    table = _table("planner", "max / mean", "99th percentile", "replicas", *["ms a layer", "x none"] * with_costs)
    for name, replay in replays.items():
        cells = [
            f"{replay.imbalance.mean():.3f}",
            f"{np.percentile(replay.imbalance, 99):.3f}",
            f"{replay.replicas:.1f}",
        ]
        if with_costs:
            own, none = (sum(cost.total for cost in compared.costs) for compared in (replay, replays["none"]))
            cells += [f"{own / len(replay.costs) * 1e3:.3f}", f"{none / own:.2f}" if own else "1.00"]
        table.add_row(name, *cells)
    return table


def _layers(numbers: np.ndarray, none: _Replay, chosen: _Replay, name: str) -> Table:
    table = _table("layer", "none", name)
    before, after = none.imbalance.mean((0, 2)), chosen.imbalance.mean((0, 2))
    for number, old, new in zip(numbers.tolist(), before, after, strict=True):
        table.add_row(str(number), f"{old:.3f}", f"{new:.3f}")
    return table

"""python -m balancing.layers --from-report DIR: the best pipeline layout for a recorded run.

Reads the costs of layers, embedding and head from the directory of --balance-report and plans the stages. Prints the
--pipeline-model-parallel-layout to train with, or the --hybrid-layer-pattern with its segments, and the predicted gain.
Layouts are simulated with Megatron's own schedule. The optimizer and all other work outside of the schedule are not
included. With --repack it also shows the cost of fewer stages, and the ranks that they free.
"""

import argparse
from dataclasses import replace
from pathlib import Path

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from balancing.command_line import Parser, real_number, whole_number
from balancing.layers.cost import LayerSeconds
from balancing.layers.memory import LayerMemory, stage_memory
from balancing.layers.plan import Pipeline, plan_pipeline
from balancing.layers.recorded import RecordedRun, estimate_memory
from balancing.layers.repack import Repack, choose_repack, repack_options
from balancing.layers.simulated_fill import weight_share
from balancing.pipeline.fixed_parts import NAMES
from balancing.pipeline.layout import from_layout, to_layout
from balancing.pipeline.pattern import read_pattern
from balancing.pipeline.schedule import Schedule
from balancing.pipeline.stage_plan import StagePlan
from balancing.report import MOST_MICRO_BATCHES, read_history
from balancing_tools.recorded_run import read_run

__all__ = ["main"]

_MOST_CHUNKS, _WORTH = 4, 0.01  # chunks a stage that are compared, and the fraction of a step that is worth a message
_MOST_PLACES = 4096  # largest --stages and --virtual
_MOST_OF_A_TAIL = 64  # layers
_WIDTH = 100  # of tables; the terminal wraps lines of text


_places = whole_number(1, _MOST_PLACES)


def _parser() -> Parser:
    description, _, more = (__doc__ or "").partition("\n\n")
    parser = Parser(prog="python -m balancing.layers", description=description, epilog=more)
    parser.add_argument(
        "--from-report", metavar="DIR", type=Path, required=True, help="the directory of --balance-report"
    )
    add = parser.add_argument
    add("--stages", type=_places, metavar="P", help="pipeline stages to plan for (default: as recorded)")
    add("--virtual", type=_places, metavar="V", help="chunks a stage to plan for (default: as recorded)")
    add(
        "--micro-batches", type=whole_number(1, MOST_MICRO_BATCHES), metavar="M",
        help="micro-batches of a step to plan for (default: as recorded)",
    )  # fmt: skip
    parser.add_argument(
        "--memory-limit", type=real_number(0, 1e6, above=True), metavar="GB",
        help="10^9 bytes that a rank may use; the memory of layers is estimated from the report",
    )  # fmt: skip
    add(
        "--mtp-layers", type=whole_number(0, _MOST_OF_A_TAIL), default=0, metavar="N",
        help="multi-token-prediction layers to write into the layout",
    )  # fmt: skip
    parser.add_argument("--layout", metavar="STRING", help="evaluate this layout instead of planning one")
    parser.add_argument("--repack", action="store_true", help="show the throughput and GPU-hours with fewer stages")
    parser.add_argument(
        "--repack-min-stages", type=_places, default=1, metavar="P", help="fewest stages to show (default: 1)"
    )
    parser.add_argument(
        "--repack-throughput-floor", type=real_number(0, 1, above=True), metavar="X",
        help="find the size with the fewest GPU-hours that keeps this fraction of the throughput; implies --repack",
    )  # fmt: skip
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Run the command. Returns an exit code of `balancing.command_line`."""
    parser = _parser()

    def work(options: argparse.Namespace) -> None:
        repacks = options.repack or options.repack_throughput_floor is not None
        if options.layout is not None:
            parser.refuse_unused(options, "on a given --layout", "--virtual")
        if not repacks:
            parser.refuse_unused(options, "without --repack", "--repack-min-stages")
            if options.layout is not None:
                parser.refuse_unused(options, "on a given --layout", "--memory-limit")
        _show(options, Console(highlight=False, markup=False, width=_WIDTH), repacks)

    return parser.run(work, arguments)


def _show(options: argparse.Namespace, console: Console, repacks: bool) -> None:
    history = read_history(options.from_report)
    run = read_run(history)
    stages = run.plan.stages if options.stages is None else options.stages
    virtual = run.plan.virtual if options.virtual is None else options.virtual
    if options.layout is None and stages * virtual > (most := run.cost.layers + len(NAMES)):
        raise ValueError(
            f"{stages:,} stages of {virtual:,} chunks are more than the {run.cost.layers} layers "
            f"and {', '.join(NAMES)} can fill; give --stages and --virtual whose product is at most {most}"
        )
    memory = None if options.memory_limit is None else estimate_memory(run)
    sizes = _sizes(run, options, memory) if repacks else []  # before any table, so that errors in flags come first
    _layout(run, options, memory, console)
    if repacks:
        _repack(run, options, sizes, console)
    if history.unread:
        print(history.unread)


def _layout(run: RecordedRun, options: argparse.Namespace, memory: LayerMemory | None, console: Console) -> None:
    stages = run.plan.stages if options.stages is None else options.stages
    virtual = run.plan.virtual if options.virtual is None else options.virtual
    count = run.micro_batches if options.micro_batches is None else options.micro_batches
    cost = run.cost
    limit = None if options.memory_limit is None else options.memory_limit * 1e9
    before = cost.simulate(run.plan, count, schedule=run.schedule).step_time
    schedule = run.schedule if stages == run.plan.stages else _other_stages(run)

    if options.layout is not None:
        plan = _given(run, options.layout, stages)
    else:
        pipeline = Pipeline(stages, count, virtual, schedule)
        plan = plan_pipeline(cost, pipeline, memory=memory, memory_limit=limit, current=run.plan, min_layers=0)
        same = (plan.stages, plan.virtual) == (run.plan.stages, run.plan.virtual)
        fits = memory is None or limit is None or (stage_memory(run.plan, memory, count, schedule) <= limit).all()
        if same and fits and before <= cost.simulate(plan, count, schedule=schedule).step_time:
            plan = run.plan
    after = cost.simulate(plan, count, schedule=schedule).step_time
    if (plan.stages, plan.virtual) == (run.plan.stages, run.plan.virtual):
        _show_stages(run, plan, console)
    if run.pattern is not None:
        _show_kinds(run, console)
    print(
        f"{cost.layers} layers, {plan.stages} stages"
        + (f" of {plan.virtual} chunks" if plan.virtual > 1 else "")
        + f", {count} micro-batches. The recorded step took {_ms(run.step_seconds)}; its pipeline, by simulation, "
        f"{_ms(before)} as recorded ({_text(run, run.plan, options)}), {_ms(after)} as planned: "
        + (f"{before / after - 1:+.1%} throughput" if after > 0 else "all costs are 0")
    )
    if plan.stages > 1 and after > 0 and not schedule.in_parts:
        fills = replace(schedule, weight_share=weight_share(recomputes=run.recomputes))
        filled = cost.step_seconds(plan, count, schedule=fills)
        print(f"With --fill-with-weight-gradients it would take {_ms(filled)}: {after / filled - 1:+.1%} throughput")
    if plan is run.plan:
        print("No better layout than the recorded one was found.")
    flag = "--pipeline-model-parallel-layout" if run.pattern is None else "--hybrid-layer-pattern"
    print(f'{flag} "{_text(run, plan, options)}"')
    if options.layout is None and options.virtual is None and not plan.tail_layers:
        _show_chunks(cost, plan, pipeline, memory, limit)


def _text(run: RecordedRun, plan: StagePlan, options: argparse.Namespace) -> str:
    """The layout or pattern string of a plan, for Megatron-LM's flag."""
    if run.pattern is not None:
        return run.pattern.text(plan)
    return to_layout(replace(plan, tail_layers=options.mtp_layers or plan.tail_layers))


def _given(run: RecordedRun, text: str, stages: int) -> StagePlan:
    """The plan of --layout. Raises ValueError, one line, if its layers are not those of the run."""
    if run.pattern is None:
        return from_layout(text, stages, layers=run.cost.layers)
    given = read_pattern(text)
    if given.symbols != run.pattern.symbols:
        raise ValueError(f"--layout {text} has other layers than the run, {run.pattern.symbols}; move only its |")
    return given.plan(stages)


def _show_kinds(run: RecordedRun, console: Console) -> None:
    """Print the cost of each kind of layer of a hybrid model."""
    assert run.pattern is not None
    table = Table("kind", "layers", "seconds of one", "of all", box=box.SIMPLE_HEAD, pad_edge=False)
    kinds, whole = np.array(run.pattern.kinds), float(run.cost.total.sum()) or 1.0
    for kind in dict.fromkeys(run.pattern.kinds):
        own = run.cost.total[kinds == kind]
        table.add_row(kind, str(len(own)), _ms(float(own.mean())), f"{own.sum() / whole:.0%}")
    console.print(table)


def _show_chunks(
    cost: LayerSeconds, plan: StagePlan, pipeline: Pipeline, memory: LayerMemory | None, limit: float | None
) -> None:
    """Print the number of chunks a stage with the shortest step, if it is not that of `plan`."""
    seconds, micro_batches, schedule = {}, pipeline.micro_batches or 0, pipeline.schedule
    for virtual in range(1, _MOST_CHUNKS + 1):
        if virtual > 1 and (plan.stages == 1 or micro_batches % plan.stages or cost.layers < virtual * plan.stages):
            continue
        try:
            other = replace(pipeline, virtual=virtual)
            fastest = plan_pipeline(cost, other, memory=memory, memory_limit=limit, min_layers=0)
        except ValueError:  # no such plan fits the memory
            continue
        seconds[virtual] = cost.simulate(fastest, micro_batches, schedule=schedule).step_time
    own = cost.simulate(plan, micro_batches, schedule=schedule).step_time
    seconds[plan.virtual] = min(own, seconds.get(plan.virtual, np.inf))
    best = min(seconds, key=lambda virtual: seconds[virtual])
    if seconds[best] < (1 - _WORTH) * seconds[plan.virtual]:
        steps = ", ".join(f"{virtual}: {_ms(seconds[virtual])}" for virtual in sorted(seconds))
        print(f"The pipeline by chunks a stage, messages not counted: {steps}. --virtual {best} prints that layout.")


def _other_stages(run: RecordedRun) -> Schedule:
    """The schedule for another number of stages. Its groups have as many micro-batches as stages."""
    return Schedule(in_parts=run.schedule.in_parts)


def _show_stages(run: RecordedRun, plan: StagePlan, console: Console) -> None:
    table = Table("stage", "layers", "seconds", "planned layers", "seconds", box=box.SIMPLE_HEAD, pad_edge=False)
    old, new = run.cost.stage_loads(run.plan), run.cost.stage_loads(plan)
    for stage in range(plan.stages):
        table.add_row(str(stage), _numbers(run.plan, stage), _ms(old[stage]), _numbers(plan, stage), _ms(new[stage]))
    even = float(old.mean()) or 1.0
    table.add_row("max / mean", "", f"{old.max() / even:.3f}", "", f"{new.max() / even:.3f}")
    console.print(table)


def _numbers(plan: StagePlan, stage: int) -> str:
    parts = [(f"{chunk[0]}-{chunk[-1]}" if len(chunk) > 1 else str(chunk[0])) if chunk else "none"
             for chunk in plan.chunks[stage]]  # fmt: skip
    return ", ".join(parts)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.4g} ms"


def _sizes(run: RecordedRun, options: argparse.Namespace, memory: LayerMemory | None) -> list[Repack]:
    count = run.micro_batches if options.micro_batches is None else options.micro_batches
    limit = None if options.memory_limit is None else options.memory_limit * 1e9
    run = replace(run, micro_batches=count)
    return repack_options(run, memory=memory, memory_limit=limit, min_stages=options.repack_min_stages)


def _repack(run: RecordedRun, options: argparse.Namespace, sizes: list[Repack], console: Console) -> None:
    table = Table("stages", "step", "throughput", "GPU-hours", "ranks freed", "nodes freed", "layers",
                  box=box.SIMPLE_HEAD, pad_edge=False)  # fmt: skip
    for size in sizes:
        if size.plan is None:
            table.add_row(str(size.stages), "impossible")
            continue
        layers = "/".join("+".join(map(str, chunks)) for chunks in size.plan.counts)
        table.add_row(str(size.stages), _ms(size.step_seconds), f"{size.throughput:.1%}", f"{size.gpu_time:.1%}",
                      str(size.freed_ranks), str(size.freed_nodes), layers)  # fmt: skip
    print(f"\nFewer stages, compared with the recorded layout on {run.plan.stages} stages:")
    console.print(table)
    for size in sizes:
        if size.plan is None:
            print(f"{size.stages}: {size.reason}")
    if options.repack_throughput_floor is not None:
        chosen = choose_repack(sizes, options.repack_throughput_floor)
        floor = f"{options.repack_throughput_floor:.0%} of the throughput"
        if chosen is None:
            raise ValueError(f"there is nothing to release: no smaller pipeline keeps {floor}; lower the floor")
        print(
            f"To keep {floor} with the fewest GPU-hours: {chosen.stages} stages, which free {chosen.freed_ranks} ranks "
            f"and {chosen.freed_nodes} whole nodes."
        )

"""Repeat the runs behind published figures, and print published and new figures side by side.

    python -m benchmarks.published [--quick] [--only RUN ...] [--json FILE]

A regular expression finds each figure of `FIGURES` in a sentence of README.md or docs, and reads the published value
there. Runs follow each other, since they share the machine. A difference above the noise of a figure is marked. Noise
is that of repeated runs on a quiet machine: 3 to 5 % on the emulated cluster, points of a percentage in real training
on two cores. Exit code 1 if anything is marked.

--quick repeats the figures of README.md, without peers and with fewer rounds, in 20 minutes on two idle cores. All
figures take an hour. For all other figures it says of which commit they are, and what of their code has changed since
(`benchmarks.since`).
"""

import argparse
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import Progress

from balancing.files import write_text
from benchmarks.emulated import RankFailed, RunTimeout
from benchmarks.experts import emulated as experts_emulated
from benchmarks.experts import plans as experts_plans
from benchmarks.experts import training as experts_training
from benchmarks.experts.emulated_workload import Scale, made_up_loads
from benchmarks.layers import emulated as layers_emulated
from benchmarks.layers import plans as layers_plans
from benchmarks.layers import training as layers_training
from benchmarks.sequences import training as sequences_training
from benchmarks.sequences.emulated import measure_rows
from benchmarks.sequences.emulated_workload import CLUSTERS, SHAPES
from benchmarks.sequences.emulated_workload import Scale as DocumentScale
from benchmarks.since import PAGE, ages
from benchmarks.whatif.published import read_published

__all__ = ["FIGURES", "RUNS", "Figure", "Found", "Run", "main", "text_of"]

ROOT = Path(__file__).parents[1]
_WITH_COSTS = "quota", "quota, --cluster"  # without costs, and with them


@dataclass(frozen=True)
class Figure:
    """Figures of one sentence.

    file: where it stands.
    pattern: a regular expression that finds the sentence once; each group is a figure.
    run: of `RUNS`.
    keys: what the run calls each figure, in the unit of the sentence.
    noise: largest difference that means nothing, in that unit.
    """

    file: str
    pattern: str
    run: str
    keys: tuple[str, ...]
    noise: float


@dataclass(frozen=True)
class Run:
    """Figures that are found together.

    command: what a reader would run.
    minutes: about how long it takes, quick and in full.
    action: finds the figures, by name; quick or in full.
    """

    command: str
    minutes: tuple[float, float]
    action: Callable[[bool], dict[str, float]]


def _of_json(command: Callable[[list[str]], object], *arguments: str) -> object:
    """What a benchmark's command line writes with --json."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "rows.json")
        command([*arguments, "--json", str(path)])
        return json.loads(path.read_text())


def _experts_emulated(quick: bool) -> dict[str, float]:
    scale, emulated = Scale(16, 32, experts_emulated.EXPERT_SECONDS[16]), experts_emulated
    names = ["none", "quota"] if quick else ["quota on even load", "none", "shadow", "prophet", "quota"]
    variants = [emulated.VARIANTS[name] for name in (emulated.CEILING, *names)]
    rows = {row.method: row for row in emulated.measure(made_up_loads(scale, 4, 4, 3), scale, variants)[0]}
    found = {name: row.speedup for name, row in rows.items()} | {"skew": rows["none"].imbalance}
    return found if quick else found | {"even": 100 / rows["quota on even load"].of_ceiling - 100}


def _sequences_emulated(quick: bool) -> dict[str, float]:
    models = ("MHA",) if quick else tuple(SHAPES)
    rows = [
        row
        for name, size in CLUSTERS.items()
        for row in measure_rows(name, DocumentScale(*size, 100.0, host=True), ("ring", "chunks"), models)
    ]
    ring, many = ([row for row in rows if (row.method, row.model) == (method, "MHA")] for method in ("ring", "chunks"))
    found = {
        "gain": float(np.mean([row.speedup for row in many])),
        "ring to limit": float(np.mean([row.to_limit for row in ring])),
        "to limit": float(np.mean([row.to_limit for row in many])),
    }
    for name, mixed in (("mixed", True), ("long", False)):
        own = [row for row in rows if row.method == "chunks" and row.model != "MHA"
               and (row.distribution == "prolong") == mixed]  # fmt: skip
        for what in ("speedup", "to_limit") if own else ():
            found |= {f"{name} {what} {end.__name__}": end(getattr(row, what) for row in own) for end in (min, max)}
    return found


def _layers_emulated(quick: bool) -> dict[str, float]:
    arguments = ["--cases", "early exit", *(["--quick"] if quick else [])]
    rows = _of_json(layers_emulated.main, *arguments)["rows"]
    row = next(row for row in rows if row["method"] == "optimal")
    return {"gain": row["speedup"], "limit": row["predicted"]}


def _experts_training(quick: bool) -> dict[str, float]:
    rows = {row["method"]: row for row in experts_training.measure(60, 50, 2 if quick else 3)}
    return {"saved": 100 * (1 - rows["on"]["ratio_to_baseline"])}


def _sequences_training(quick: bool) -> dict[str, float]:
    rows = {row["method"]: row for row in sequences_training.measure(*((8, 2) if quick else (12, 3)))}
    return {"saved": 100 * (1 - rows["chunks"]["ratio_to_baseline"])}


def _layers_training(quick: bool) -> dict[str, float]:
    found = {}
    for case in layers_training.CASES:
        rows, wrong = layers_training.measure(case, *((8, 2) if quick else layers_training.ROUNDS))
        if wrong:
            raise ValueError("; ".join(wrong))
        found |= {f"{case} {name}": row[name] for row in rows if row["method"] == "balanced"
                  for name in ("speedup", "quickest_speedup", "bound")}  # fmt: skip
    gains = [100 * found[f"{case} speedup"] - 100 for case in layers_training.CASES]
    return found | {"least": min(gains), "most": max(gains)}


def _experts_drift(quick: bool) -> dict[str, float]:
    with Progress(console=Console(stderr=True), transient=True) as progress:
        rows = [row for row in experts_plans.grid(6, progress) if row.case.endswith("drift 0.2")]
    found = {}
    for name, methods in (("", _WITH_COSTS), ("late ", ("quota, 1 late slot",))):
        left = [100 * row.figure - 100 for row in rows if row.method in methods]
        found |= {f"{name}least": min(left), f"{name}most": max(left)}
        copies = np.mean([row.more["late"] for row in rows if row.method in methods])
        print(f"drift 0.2, {methods[0]}: {min(left):.1f} to {max(left):.1f} % stay, {copies:.1f} late copies a layer")
    return found


def _layers_plans(quick: bool) -> dict[str, float]:
    rows = _of_json(layers_plans.main)["rows"]
    reached = [100 * row["more"]["of_oracle"] for row in rows if row["method"] == "optimal, gate"]
    return {"least": min(reached), "most": max(reached)}


def _forecasts(quick: bool) -> dict[str, float]:
    errors = 100 * np.abs([row.error() for row in read_published()])
    return {"median": float(np.median(errors)), "worst": float(errors.max()), "steps": float(len(errors))}


RUNS = {
    "forecasts": Run("benchmarks.whatif", (0.1, 0.1), _forecasts),
    "drift": Run("benchmarks.experts.plans", (0.5, 0.5), _experts_drift),
    "layers, emulated": Run("benchmarks.layers.emulated --cases 'early exit'", (1, 2), _layers_emulated),
    "sequences, emulated": Run("benchmarks.sequences.emulated", (3, 8), _sequences_emulated),
    "experts, emulated": Run("benchmarks.experts.emulated --ranks 16", (5, 10), _experts_emulated),
    "sequences, real": Run("benchmarks.sequences.training", (2, 3), _sequences_training),
    "experts, real": Run("benchmarks.experts.training", (4, 6), _experts_training),
    "layers, real": Run("benchmarks.layers.training", (4, 9), _layers_training),
    "layers, planned": Run("benchmarks.layers.plans", (10, 10), _layers_plans),
}
FIGURES = (
    Figure("README.md", r"busiest rank ([\d.]+) times the mean, 16 ranks", "experts, emulated", ("skew",), 0.1),
    Figure("README.md", r"\*\*([\d.]+) times faster\*\* \| ([\d.]+), even routing", "experts, emulated",
           ("quota", "forced balance"), 0.06),
    Figure("README.md", r"over a ring \| \*\*([\d.]+) times faster\*\* \| ([\d.]+), equal work", "sequences, emulated",
           ("gain", "ring to limit"), 0.15),
    Figure("README.md", r"8 stages \| \*\*([\d.]+) times faster\*\* \| ([\d.]+), best layout", "layers, emulated",
           ("gain", "limit"), 0.06),
    Figure("README.md", r"layers \| (\d+) %; \d+ %; \d", "experts, real", ("saved",), 5),
    Figure("README.md", r"layers \| \d+ %; (\d+) %;", "sequences, real", ("saved",), 4),
    Figure("README.md", r"%; (\d+) to (\d+) % \|", "layers, real", ("least", "most"), 8),
    Figure("README.md", r"each iteration, (\d+) to (\d+) % of imbalance stay", "drift", ("least", "most"), 3),
    Figure("docs/experts.md", r"([\d.]+) times faster \(`prophet` ([\d.]+), FasterMoE's shadowing ([\d.]+)\) \| "
           r"([\d.]+)",
           "experts, emulated", ("quota", "prophet", "shadow", "forced balance"), 0.06),
    Figure("docs/experts.md", r"even routing \| costs ([\d.]+) %", "experts, emulated", ("even",), 0.5),
    Figure("docs/experts.md", r"([\d.]+) % off a step", "experts, real", ("saved",), 5),
    Figure("docs/experts.md", r"each iteration, \[(\d+) to (\d+) % of imbalance stay", "drift", ("least", "most"), 3),
    Figure("docs/sequences.md", r"six cases \| ([\d.]+) times faster \| ([\d.]+)", "sequences, emulated",
           ("gain", "to limit"), 0.1),
    Figure("docs/sequences.md", r"mixed length \| ([\d.]+) to ([\d.]+) times faster \| ([\d.]+) to ([\d.]+)",
           "sequences, emulated",
           ("mixed speedup min", "mixed speedup max", "mixed to_limit min", "mixed to_limit max"), 0.06),
    Figure("docs/sequences.md", r"the batch \| ([\d.]+) to ([\d.]+) times \| ([\d.]+) to ([\d.]+)",
           "sequences, emulated",
           ("long speedup min", "long speedup max", "long to_limit min", "long to_limit max"), 0.06),
    Figure("docs/layers.md", r"frozen first stage.*?([\d.]+) by medians, ([\d.]+) by the quickest steps \| ([\d.]+)",
           "layers, real", tuple(f"freezing {name}" for name in ("speedup", "quickest_speedup", "bound")), 0.08),
    Figure("docs/layers.md", r"early exit, real.*?([\d.]+) by medians, ([\d.]+) by the quickest steps \| ([\d.]+)",
           "layers, real", tuple(f"early exit {name}" for name in ("speedup", "quickest_speedup", "bound")), 0.08),
    Figure("docs/layers.md", r"default settings reaches ([\d.]+) to ([\d.]+) % of an oracle", "layers, planned",
           ("least", "most"), 0.5),
    Figure("docs/whatif.md", r"off by (\d+) % in the median and by (\d+) % at worst on (\d+) published", "forecasts",
           ("median", "worst", "steps"), 1),
)  # fmt: skip


@dataclass(frozen=True)
class Found:
    """One figure, as published and as found."""

    file: str
    key: str
    run: str
    published: float
    found: float
    noise: float

    @property
    def differs(self) -> bool:
        return abs(self.found - self.published) > self.noise + 1e-9

    def line(self) -> str:
        mark = "  DIFFERS" if self.differs else ""
        name = f"{self.run}: {self.key}"
        return f"{self.file:18} {name:44} {self.published:9.4g} {self.found:9.4g} +-{self.noise:<5g}{mark}"


def text_of(figure: Figure) -> tuple[float, ...]:
    """What is published. Raises ValueError unless its sentence stands in its file once."""
    found = re.findall(figure.pattern, (ROOT / figure.file).read_text())
    if len(found) != 1:
        raise ValueError(
            f"{figure.file} has {len(found)} times what {figure.pattern!r} finds; mend benchmarks/published.py"
        )
    return tuple(map(float, found[0] if isinstance(found[0], tuple) else found))


def compare(figure: Figure, found: Mapping[str, float]) -> list[Found]:
    """The figures of one sentence. found: what its run gave."""
    return [Found(figure.file, key, figure.run, published, found[key], figure.noise)
            for key, published in zip(figure.keys, text_of(figure), strict=True)]  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code: 1 for a difference, 2 for a sentence that is not where it was."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.published", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--quick", action="store_true", help="only figures of README.md, in 20 minutes")
    parser.add_argument("--only", nargs="+", choices=list(RUNS), metavar="RUN", help="only these: " + ", ".join(RUNS))
    parser.add_argument("--json", metavar="FILE", help="write the new figures to FILE")
    options = parser.parse_args(arguments)
    chosen = [each for each in FIGURES if each.file == "README.md" or not options.quick]
    names = [name for name in options.only or RUNS if name in {each.run for each in chosen}]
    rows: list[Found] = []
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} before the start")
    print(f"{'where':18} {'what':44} {'published':>9} {'found':>9} noise", flush=True)
    try:
        published = {each: text_of(each) for each in chosen}  # all of them, before anything takes minutes
        assert all(len(each.keys) == len(figures) for each, figures in published.items())
        for name in names:
            run, begin = RUNS[name], time.perf_counter()
            print(
                f"python -m {run.command}, about {run.minutes[not options.quick]:g} minutes",
                file=sys.stderr,
                flush=True,
            )
            with redirect_stdout(sys.stderr):
                found = run.action(options.quick)
            own = [row for each in chosen if each.run == name for row in compare(each, found)]
            rows += own
            print("\n".join(row.line() for row in own), flush=True)
            print(f"{name}: {time.perf_counter() - begin:.0f} s", file=sys.stderr, flush=True)
        if options.json:
            write_text(
                options.json, json.dumps([asdict(row) | {"differs": row.differs} for row in rows], indent=1) + "\n"
            )
    except (ValueError, OSError) as error:
        print(f"published: {error}", file=sys.stderr)
        return 2
    except (RankFailed, RunTimeout) as error:
        print(f"published: {error}", *getattr(error, "tail", ()), sep="\n", file=sys.stderr)
        return 1
    repeated = {f"python -m {RUNS[name].command.split()[0]}" for name in names}
    try:
        older = [age for age in ages(PAGE.read_text()) if age.command not in repeated]
        print("not repeated:", *older, sep="\n  ")
    except ValueError as error:
        print(f"not repeated, of unknown age: {error}")
    marked = sum(row.differs for row in rows)
    print(f"{len(rows)} figures, {marked} differ by more than their noise")
    return 1 if marked else 0


if __name__ == "__main__":
    sys.exit(main())

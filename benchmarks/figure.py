"""Pictures of documents, drawn from the rows that a benchmark writes with --json.

    python -m benchmarks.figure experts|layers|sequences|micro_batches ROWS.json docs/figures/NAME.png

- experts: the busiest rank over the mean, of `benchmarks.experts.plans`.
- layers: throughput over equal numbers of layers, of `benchmarks.layers.plans`.
- sequences: the modelled step over the limit, of `benchmarks.sequences.plans`.
- micro_batches: the pipeline step over that of equal ones, of `benchmarks.sequences.micro_batches`.
"""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from balancing.files import output

__all__ = ["FIGURES", "draw", "save_figure"]

_Found = dict[tuple[str, str], float]  # by case and method


def save_figure(figure: Figure, path: str | Path, **options: Any) -> None:
    """Write `figure` in the format that the name of the file ends with, PNG without one, whole or not at all. Figures
    of this repository are PNG: as text, curves are thousands of lines that nobody reads. options: of `savefig`.

    Raises ValueError, in one line, if the file cannot be written.
    """
    options.setdefault("dpi", 110)
    with output(path) as file:
        figure.savefig(file, format=Path(path).suffix.removeprefix(".") or "png", **options)


@dataclass(frozen=True)
class Bars:
    """Groups of bars that begin at 1.

    section: of the rows. figure: the key of what is drawn. title: of the axis.
    cases: row's case -> name below its group; None for all there are.
    methods: row's method -> its label and color.
    ticks: of a logarithmic axis; empty for a linear one.
    annotated: methods whose bars have a number; all by default.
    prepare: adds what is not a row of its own.
    """

    section: str
    title: str
    methods: Mapping[str, tuple[str, str]]
    cases: Mapping[str, str] | None = None
    figure: str = "figure"
    ticks: Sequence[int] = ()
    annotated: Sequence[str] = ()
    prepare: Callable[[_Found], _Found] = lambda found: found


def _of_most_layers(found: _Found) -> _Found:
    """The runs with the largest number of layers, and of several chunks a stage the best number."""
    most = max((case.rpartition(", ")[2] for case, _ in found), key=lambda text: int(text.split()[0]))
    own = {(case.rpartition(", ")[0], method): value for (case, method), value in found.items() if case.endswith(most)}
    chunks = [f"optimal, {chunks} chunks, gate" for chunks in (2, 3, 4)]
    return own | {(case, "chunks"): max(own[case, method] for method in chunks) for case, _ in own}


_GREY, _YELLOW, _ORANGE, _GREEN = "#9aa0a6", "#c9a227", "#d9733a", "#2f7d5b"
_SOURCES = {
    "prolong": "ProLong", "pretrain": "pretraining mix", "packed": "packed", "wikipedia": "Wikipedia", "web": "web",
    "mix": "60 % in 64k", "lognormal": "log-normal",
}  # fmt: skip
FIGURES = {
    "experts": Bars(
        "replay, last micro-batch",
        "tokens of the busiest rank / mean",
        {
            "none": ("no balancing", _GREY), "shadow": ("FasterMoE", _YELLOW), "prophet": ("Pro-Prophet", _ORANGE),
            "eplb": ("EPLB", "#6b8fb5"), "quota": ("quota (ours)", _GREEN),
        },
        {f"EP {ranks}, 2 slots": f"expert parallel {ranks}" for ranks in (8, 16, 32)},
        ticks=(1, 2, 4, 8),
    ),
    "layers": Bars(
        "training",
        "throughput over\nequal numbers of layers",
        {
            "static": ("best fixed plan, known afterwards", _YELLOW), "diffusion, gate": ("diffusion (DynMo)", _ORANGE),
            "optimal, gate": ("optimal (ours)", _GREEN),
            "chunks": ("optimal, best of 2 to 4 chunks a stage", "#8fc3a7"), "oracle": ("oracle of one chunk", "white"),
        },
        figure="speedup",
        annotated=("optimal, gate", "chunks"),
        prepare=_of_most_layers,
    ),
    "sequences": Bars(
        "modelled time / limit, A800, MHA",
        "modelled step / limit",
        {
            "ring": ("ring (TE p2p)", _GREY), "hybrid": ("hybrid (Megatron-LM)", _YELLOW),
            "zones": ("zones (Zeppelin)", _ORANGE), "chunks": ("chunks (ours)", _GREEN),
        },
        {f"{name}, 64 ranks": text for name, text in _SOURCES.items() if name not in ("wikipedia", "web")},
        ticks=(1, 2, 4, 8, 16, 32),
    ),
    "micro_batches": Bars(
        "step / equal micro-batches, simulated",
        "step / equal micro-batches",
        {
            "drawn": ("as drawn (Megatron-LM)", _GREY), "sorted": ("sorted by length", _ORANGE),
            "differencing": ("Karmarkar-Karp, squares (verl)", "#8f6bbd"), "hybrid": ("hybrid (Megatron-LM)", _YELLOW),
            "slopes": ("cheaper at both ends (ours)", _GREEN),
        },
        {f"{name}, 8 samples, 8 micro-batches": text for name, text in _SOURCES.items()},
        annotated=("drawn", "slopes"),
    ),
}  # fmt: skip


def draw(bars: Bars, rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw a figure of `FIGURES` into `path`."""
    of_section = [row for row in rows if row["section"] == bars.section and row.get("unit") != "p99"]
    found = bars.prepare({(row["case"], row["method"]): row[bars.figure] for row in of_section})
    cases = bars.cases or {case: case.replace(" ", "\n", 1) for case, _ in found}
    figure, axes = plt.subplots(figsize=(8.5, 3.4))
    width = 0.84 / len(bars.methods)
    for number, (method, (label, color)) in enumerate(bars.methods.items()):
        middles = [group + (number - (len(bars.methods) - 1) / 2) * width for group in range(len(cases))]
        values = [found[case, method] for case in cases]
        axes.bar(
            middles, [value - 1 for value in values], width * 0.92, bottom=1, color=color, label=label,
            edgecolor=_GREEN if color == "white" else None, linewidth=0.8,
        )  # fmt: skip
        for x, value in zip(middles, values, strict=True):
            if not bars.annotated or method in bars.annotated:
                side, text = "bottom" if value >= 1 else "top", f"{value:.2f}" if value < 10 else f"{value:.0f}"
                axes.annotate(text, (x, value), ha="center", va=side, fontsize=7.5)
    axes.axhline(1, color="#333333", linewidth=0.8)
    if bars.ticks:
        axes.set_yscale("log")
        axes.set_yticks(bars.ticks, [str(tick) for tick in bars.ticks])
        axes.minorticks_off()
    axes.margins(y=0.1)
    axes.set_xticks(range(len(cases)), list(cases.values()), fontsize=8.5)
    axes.set_ylabel(bars.title)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(ncols=3, frameon=False, fontsize=8, loc="lower center", bbox_to_anchor=(0.5, 1.0))
    save_figure(figure, path, bbox_inches="tight", facecolor="white")
    plt.close(figure)


def main() -> None:
    if len(sys.argv) != 4 or sys.argv[1] not in FIGURES:
        raise SystemExit(f"usage: python -m benchmarks.figure {'|'.join(FIGURES)} ROWS.json FIGURE.png")
    content = json.loads(Path(sys.argv[2]).read_text())
    draw(FIGURES[sys.argv[1]], content["rows"], Path(sys.argv[3]))


if __name__ == "__main__":
    main()

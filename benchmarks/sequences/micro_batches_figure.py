"""Draws the pipeline step of each method, from the rows of `benchmarks.sequences.micro_batches --json FILE`.

python -m benchmarks.sequences.micro_batches_figure ROWS.json docs/figures/micro_batches.png
"""

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt

from benchmarks.figure_file import save_figure

SECTIONS = {
    "cost max / mean": "dearest micro-batch / mean",
    "step / equal micro-batches, simulated": "step / equal micro-batches",
}
SOURCES = {
    "prolong": "ProLong",
    "pretrain": "pretraining mix",
    "packed": "packed",
    "wikipedia": "Wikipedia",
    "web": "web",
    "mix": "60 % in 64k",
    "lognormal": "log-normal",
}
LABELS = {
    "drawn": "as drawn (Megatron-LM)",
    "sorted": "sorted by length",
    "differencing": "Karmarkar-Karp, squares (verl)",
    "hybrid": "hybrid (Megatron-LM)",
    "balanced": "even (ours)",
    "slopes": "slopes, as it trains (ours)",
}
COLORS = {
    "drawn": "#9aa0a6",
    "sorted": "#d9733a",
    "differencing": "#8f6bbd",
    "hybrid": "#c9a227",
    "balanced": "#8fc3a7",
    "slopes": "#2f7d5b",
}


def draw(rows: list[dict[str, Any]], case: str, path: Path) -> None:
    """Bars by distribution, from 1, which is even: balance above, the step of a pipeline below."""
    found = {(row["section"], row["case"], row["method"]): row["figure"] for row in rows}
    figure, panels = plt.subplots(2, 1, figsize=(8, 5.2), sharex=True)
    width = 0.84 / len(LABELS)
    for axes, (section, title) in zip(panels, SECTIONS.items(), strict=True):
        for number, (method, label) in enumerate(LABELS.items()):
            at = [group + (number - (len(LABELS) - 1) / 2) * width for group in range(len(SOURCES))]
            values = [found.get((section, f"{source}, {case}", method), 0.0) for source in SOURCES]
            axes.bar(
                at,
                [value - 1 if value else 0.0 for value in values],
                width * 0.92,
                bottom=1,
                color=COLORS[method],
                label=label,
            )
            for x, value in zip(at, values, strict=True):
                if value:
                    side = "bottom" if value >= 1 else "top"
                    axes.annotate(f"{value:.2f}", (x, value), ha="center", va=side, fontsize=5)
        axes.axhline(1, color="#444444", linewidth=0.6)
        axes.margins(y=0.08)
        axes.set_ylabel(title, fontsize=8.5)
        axes.tick_params(axis="y", labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    figure.subplots_adjust(hspace=0.12)
    panels[1].set_xticks(range(len(SOURCES)), list(SOURCES.values()), fontsize=8)
    panels[0].legend(ncols=3, frameon=False, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, 1.3))
    save_figure(figure, path, bbox_inches="tight", facecolor="white")


def main() -> None:
    if len(sys.argv) != 3:
        raise SystemExit("usage: python -m benchmarks.sequences.micro_batches_figure ROWS.json FIGURE.png")
    draw(json.loads(Path(sys.argv[1]).read_text())["rows"], "8 samples, 8 micro-batches", Path(sys.argv[2]))


if __name__ == "__main__":
    main()

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

SECTION = "step / equal micro-batches, simulated"
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
    "slopes": "cheaper at both ends (ours)",
}
COLORS = {
    "drawn": "#9aa0a6",
    "sorted": "#d9733a",
    "differencing": "#8f6bbd",
    "hybrid": "#c9a227",
    "slopes": "#2f7d5b",
}


def draw(rows: list[dict[str, Any]], case: str, path: Path) -> None:
    """Step of a pipeline by distribution, as bars from 1, which is that of equal micro-batches."""
    found = {row["case"]: {} for row in rows if row["section"] == SECTION}
    for row in rows:
        if row["section"] == SECTION:
            found[row["case"]][row["method"]] = row["figure"]
    figure, axes = plt.subplots(figsize=(8, 3.2))
    width = 0.84 / len(LABELS)
    for number, (method, label) in enumerate(LABELS.items()):
        for group, source in enumerate(SOURCES):
            value = found[f"{source}, {case}"][method]
            x = group + (number - (len(LABELS) - 1) / 2) * width
            axes.bar(x, value - 1, width * 0.92, bottom=1, color=COLORS[method], label=None if group else label)
            if method in ("drawn", "slopes"):
                side = "bottom" if value >= 1 else "top"
                axes.annotate(f"{value:.2f}", (x, value), ha="center", va=side, fontsize=7.5)
    axes.axhline(1, color="#444444", linewidth=0.6)
    axes.margins(y=0.1)
    axes.set_ylabel("step / equal micro-batches", fontsize=8.5)
    axes.tick_params(axis="y", labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xticks(range(len(SOURCES)), list(SOURCES.values()), fontsize=8.5)
    axes.legend(ncols=3, frameon=False, fontsize=8, loc="lower center", bbox_to_anchor=(0.5, 1.0))
    save_figure(figure, path, bbox_inches="tight", facecolor="white")


def main() -> None:
    if len(sys.argv) != 3:
        raise SystemExit("usage: python -m benchmarks.sequences.micro_batches_figure ROWS.json FIGURE.png")
    draw(json.loads(Path(sys.argv[1]).read_text())["rows"], "8 samples, 8 micro-batches", Path(sys.argv[2]))


if __name__ == "__main__":
    main()

"""Draws the modelled step of each planner, from the rows of `benchmarks.sequences.plans --json FILE`.

python -m benchmarks.sequences.figure ROWS.json docs/figures/sequences.png
"""

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt

from benchmarks.figure_file import save_figure

RANKS, MACHINE = 64, "A800, MHA"
CASES = {
    "prolong": "ProLong",
    "pretrain": "pretraining mix",
    "packed": "packed",
    "mix": "60 % in 64k",
    "lognormal": "log-normal",
}
LABELS = {
    "ring": "ring (TE p2p)",
    "hybrid": "hybrid (Megatron-LM)",
    "zones": "zones (Zeppelin)",
    "chunks": "chunks (ours)",
}
COLORS = {"ring": "#9aa0a6", "hybrid": "#c9a227", "zones": "#d9733a", "chunks": "#2f7d5b"}
SECTION = f"modelled time / limit, {MACHINE}"


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Bars by distribution on a logarithmic axis from the limit, 1, upwards."""
    found = {row["case"]: {} for row in rows if row["section"] == SECTION}
    for row in rows:
        if row["section"] == SECTION:
            found[row["case"]][row["method"]] = row["figure"]
    figure, axes = plt.subplots(figsize=(8, 3.4))
    width = 0.84 / len(LABELS)
    for number, (method, label) in enumerate(LABELS.items()):
        middles = [group + (number - (len(LABELS) - 1) / 2) * width for group in range(len(CASES))]
        values = [found[f"{case}, {RANKS} ranks"][method] for case in CASES]
        axes.bar(middles, values, width * 0.92, color=COLORS[method], label=label)
        for x, value in zip(middles, values, strict=True):
            text = f"{value:.2f}" if value < 10 else f"{value:.0f}"
            axes.annotate(text, (x, value), ha="center", va="bottom", fontsize=7)
    ticks = [1, 2, 4, 8, 16, 32]
    axes.set_yscale("log")
    axes.set_ylim(0.9, 44)
    axes.axhline(1, color="#333333", linewidth=0.8)
    axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.set_ylabel("modelled step / limit", fontsize=8.5)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xticks(range(len(CASES)), list(CASES.values()), fontsize=8.5)
    axes.legend(ncols=len(LABELS), frameon=False, fontsize=8, loc="lower center", bbox_to_anchor=(0.5, 1.0))
    save_figure(figure, path, bbox_inches="tight", facecolor="white")


def main() -> None:
    if len(sys.argv) != 3:
        raise SystemExit("usage: python -m benchmarks.sequences.figure ROWS.json FIGURE.png")
    draw(json.loads(Path(sys.argv[1]).read_text())["rows"], Path(sys.argv[2]))


if __name__ == "__main__":
    main()

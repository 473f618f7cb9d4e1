"""Figure of the imbalance by planner, from the rows that `benchmarks.experts.plans --json FILE` writes.

python -m benchmarks.experts.figure ROWS.json docs/figures/experts.png
"""

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt

from benchmarks.figure_file import save_figure

SECTION, CASES = "replay, last micro-batch", ("EP 8, 2 slots", "EP 16, 2 slots", "EP 32, 2 slots")
LABELS = {
    "none": "no balancing",
    "shadow": "FasterMoE",
    "prophet": "Pro-Prophet",
    "eplb": "EPLB",
    "quota": "quota (ours)",
}
COLORS = {"none": "#9aa0a6", "shadow": "#c9a227", "prophet": "#d9733a", "eplb": "#6b8fb5", "quota": "#2f7d5b"}


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Bars of mean rank max / mean by expert-parallel size, on a logarithmic axis from the ideal, 1, upwards."""
    found = {(r["case"], r["method"]): r["figure"] for r in rows if r["section"] == SECTION and r["unit"] == "mean"}
    figure, axes = plt.subplots(figsize=(8, 3.4))
    width = 0.8 / len(LABELS)
    for number, method in enumerate(LABELS):
        at = [group + (number - (len(LABELS) - 1) / 2) * width for group in range(len(CASES))]
        values = [found[case, method] for case in CASES]
        axes.bar(at, values, width * 0.92, color=COLORS[method], label=LABELS[method])
        for x, value in zip(at, values, strict=True):
            axes.annotate(f"{value:.2f}", (x, value), ha="center", va="bottom", fontsize=7.5)
    axes.set_yscale("log")
    axes.set_ylim(0.9, 16)
    axes.axhline(1, color="#333333", linewidth=0.8)
    axes.set_yticks([1, 2, 4, 8], ["1", "2", "4", "8"])
    axes.minorticks_off()
    axes.set_xticks(range(len(CASES)), [case.split(",")[0].replace("EP", "expert parallel") for case in CASES])
    axes.set_ylabel("tokens of the busiest rank / mean")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(ncols=len(LABELS), frameon=False, fontsize=8.5, loc="upper center", bbox_to_anchor=(0.5, 1.16))
    save_figure(figure, path, bbox_inches="tight", facecolor="white")


def main() -> None:
    if len(sys.argv) != 3:
        raise SystemExit("usage: python -m benchmarks.experts.figure ROWS.json FIGURE.png")
    draw(json.loads(Path(sys.argv[1]).read_text())["rows"], Path(sys.argv[2]))


if __name__ == "__main__":
    main()

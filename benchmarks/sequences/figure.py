"""Draws the imbalance that each planner leaves, from the rows of `benchmarks.sequences.plans --json FILE`.

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
PANELS = {
    "attention max / mean": ("attention of the busiest rank / mean", (0.95, 4.2), [1, 1.5, 2, 3, 4]),
    f"modelled time / limit, {MACHINE}": ("modelled time of a step / limit", (0.9, 44), [1, 2, 4, 8, 16, 32]),
}


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Bars by distribution on logarithmic axes from the ideal, 1, upwards: balance above, modelled time below."""
    found = {(row["section"], row["case"], row["method"]): row["figure"] for row in rows}
    figure, panels = plt.subplots(2, 1, figsize=(8, 5.6), sharex=True)
    width = 0.84 / len(LABELS)
    for axes, (section, (title, limits, ticks)) in zip(panels, PANELS.items(), strict=True):
        for number, method in enumerate(LABELS):
            at = [group + (number - (len(LABELS) - 1) / 2) * width for group in range(len(CASES))]
            values = [found[section, f"{case}, {RANKS} ranks", method] for case in CASES]
            axes.bar(at, values, width * 0.92, color=COLORS[method], label=LABELS[method])
            for x, value in zip(at, values, strict=True):
                axes.annotate(
                    f"{value:.2f}" if value < 10 else f"{value:.0f}", (x, value), ha="center", va="bottom", fontsize=6.5
                )
        axes.set_yscale("log")
        axes.set_ylim(*limits)
        axes.axhline(1, color="#333333", linewidth=0.8)
        axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.minorticks_off()
        axes.set_ylabel(title, fontsize=8.5)
        axes.spines[["top", "right"]].set_visible(False)
    panels[1].set_xticks(range(len(CASES)), list(CASES.values()))
    panels[0].legend(ncols=len(LABELS), frameon=False, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, 1.2))
    save_figure(figure, path, bbox_inches="tight", facecolor="white")


def main() -> None:
    if len(sys.argv) != 3:
        raise SystemExit("usage: python -m benchmarks.sequences.figure ROWS.json FIGURE.png")
    draw(json.loads(Path(sys.argv[1]).read_text())["rows"], Path(sys.argv[2]))


if __name__ == "__main__":
    main()

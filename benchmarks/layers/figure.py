"""Figure of speedups over equal numbers of layers, from the rows of `benchmarks.layers.plans --json FILE`.

python -m benchmarks.layers.figure ROWS.json docs/figures/layers.png
"""

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt

from benchmarks.figure_file import save_figure

LABELS = {
    "static": "best fixed plan, known afterwards",
    "diffusion, gate": "diffusion (DynMo)",
    "optimal, gate": "optimal (ours)",
    "chunks": "optimal, best of 2 to 4 chunks a stage",
    "oracle": "oracle of one chunk",
}
COLORS = {
    "static": "#c9a227",
    "diffusion, gate": "#d9733a",
    "optimal, gate": "#2f7d5b",
    "chunks": "#8fc3a7",
    "oracle": "#ffffff",
}
CHUNKS = [f"optimal, {chunks} chunks, gate" for chunks in (2, 3, 4)]


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Bars of throughput over a whole run by case, from 1, at the largest number of layers there is."""
    trained = [row for row in rows if row["section"] == "training"]
    layers = max((row["case"].rpartition(", ")[2] for row in trained), key=lambda text: int(text.split()[0]))
    found = {
        (row["case"].rpartition(", ")[0], row["method"]): row["speedup"] for row in trained if layers in row["case"]
    }
    cases = list(dict.fromkeys(case for case, _ in found))
    found |= {(case, "chunks"): max(found[case, method] for method in CHUNKS) for case in cases}
    figure, axes = plt.subplots(figsize=(9, 3.4))
    width = 0.84 / len(LABELS)
    for number, (method, label) in enumerate(LABELS.items()):
        middles = [group + (number - (len(LABELS) - 1) / 2) * width for group in range(len(cases))]
        values = [found[case, method] for case in cases]
        edge = "#2f7d5b" if method == "oracle" else None
        axes.bar(
            middles, [value - 1 for value in values], width * 0.9, bottom=1, color=COLORS[method], label=label,
            edgecolor=edge, linewidth=0.8,
        )  # fmt: skip
        for x, value in zip(middles, values, strict=True):
            if method in ("optimal, gate", "chunks"):
                axes.annotate(f"{value:.2f}", (x, max(value, 1)), ha="center", va="bottom", fontsize=7.5)
    axes.axhline(1, color="#333333", linewidth=0.8)
    axes.set_ylim(0.99, max(found.values()) + 0.05)
    axes.set_xticks(range(len(cases)), [case.replace(" ", "\n", 1) for case in cases])
    axes.set_ylabel("throughput over\nequal numbers of layers")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(ncols=3, frameon=False, fontsize=8.5, loc="lower center", bbox_to_anchor=(0.5, 1.0))
    save_figure(figure, path, bbox_inches="tight", facecolor="white")
    plt.close(figure)


def main() -> None:
    if len(sys.argv) != 3:
        raise SystemExit("usage: python -m benchmarks.layers.figure ROWS.json FIGURE.png")
    draw(json.loads(Path(sys.argv[1]).read_text())["rows"], Path(sys.argv[2]))


if __name__ == "__main__":
    main()

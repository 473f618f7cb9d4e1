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
    "uniform": "equal numbers of layers",
    "deepspeed": "DeepSpeed, by parameters",
    "static": "best fixed plan, known afterwards",
    "diffusion, gate": "diffusion",
    "optimal, gate": "optimal (ours)",
    "optimal, 2 chunks, gate": "optimal, 2 chunks a stage",
    "optimal, 3 chunks, gate": "optimal, 3 chunks a stage",
    "optimal, 4 chunks, gate": "optimal, 4 chunks a stage",
    "oracle": "oracle of one chunk",
}
COLORS = {
    "uniform": "#9aa0a6",
    "deepspeed": "#6b8fb5",
    "static": "#c9a227",
    "diffusion, gate": "#d9733a",
    "optimal, gate": "#2f7d5b",
    "optimal, 2 chunks, gate": "#58a884",
    "optimal, 3 chunks, gate": "#7abb9d",
    "optimal, 4 chunks, gate": "#a3d3bd",
    "oracle": "#d5e4dc",
}


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Bars of throughput over a whole run by case, at the largest number of layers there is."""
    trained = [row for row in rows if row["section"] == "training"]
    layers = max((row["case"].rpartition(", ")[2] for row in trained), key=lambda text: int(text.split()[0]))
    found = {
        (row["case"].rpartition(", ")[0], row["method"]): row["speedup"] for row in trained if layers in row["case"]
    }
    cases = list(dict.fromkeys(case for case, _ in found))
    figure, axes = plt.subplots(figsize=(9, 3.6))
    width = 0.84 / len(LABELS)
    chunks = [method for method in LABELS if "chunks" in method]
    quickest = {case: max(chunks, key=lambda method: found[case, method]) for case in cases}
    for number, method in enumerate(LABELS):
        at = [group + (number - (len(LABELS) - 1) / 2) * width for group in range(len(cases))]
        values = [found[case, method] for case in cases]
        edge = "#2f7d5b" if method == "oracle" else None
        axes.bar(at, values, width * 0.9, color=COLORS[method], label=LABELS[method], edgecolor=edge, linewidth=0.8)
        for case, x, value in zip(cases, at, values, strict=True):
            if method in ("optimal, gate", quickest[case]):
                side = "right" if method == "optimal, gate" else "center"
                axes.annotate(f"{value:.2f}", (x, value), ha=side, va="bottom", fontsize=7.5)
    axes.axhline(1, color="#333333", linewidth=0.8)
    axes.set_ylim(0, 2.1)
    axes.set_xticks(range(len(cases)), [case.replace(" ", "\n", 1) for case in cases])
    axes.set_ylabel("throughput over\nequal numbers of layers")
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(
        f"{layers} on 8 stages, a whole training run, moves included (modelled, simulated)", fontsize=9, loc="left"
    )
    axes.legend(ncols=2, frameon=False, fontsize=8.5, loc="upper left")
    save_figure(figure, path, bbox_inches="tight", facecolor="white")
    plt.close(figure)


def main() -> None:
    if len(sys.argv) != 3:
        raise SystemExit("usage: python -m benchmarks.layers.figure ROWS.json FIGURE.png")
    draw(json.loads(Path(sys.argv[1]).read_text())["rows"], Path(sys.argv[2]))


if __name__ == "__main__":
    main()

"""How a step with all three balancers works: the picture of docs/together.md, from real plans of a small job.

python -m benchmarks.together.how docs/figures/how.png
"""

import sys
from collections.abc import Iterable, Sequence

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

from balancing.cluster import Cluster
from balancing.experts import contiguous_homes, plan_replicas, split_tokens
from balancing.experts.config import ExpertConfig
from balancing.layers import plan_stages
from balancing.sequences import AttentionShape, causal_area, plan_sequences
from benchmarks.figure import save_figure

RANKS = 4
DOCUMENTS = [[12000], [6000, 6000], [4000] * 3, [2000] * 6]  # of each rank, as sampled
TOKENS = [700, 120, 90, 60, 80, 60, 50, 40]  # of each expert
LAYERS = [0.5] * 8 + [1.0] * 8  # cost; the first eight are frozen
MACHINE = Cluster.sheet("h100-8x400g").relabel(1, RANKS)
COLORS = plt.get_cmap("tab20").colors  # type: ignore[attr-defined]

Bar = tuple[float, float, float, int, bool]  # x, bottom, height, color, hatched


def _stacks(parts: Iterable[tuple[float, int, float, bool]]) -> list[Bar]:
    """Bars on top of one another. parts: (x, color, height, hatched) in the order in which they are stacked."""
    top: dict[float, float] = {}
    bars = []
    for x, color, height, hatched in parts:
        bars.append((x, top.get(x, 0.0), height, color, hatched))
        top[x] = top.get(x, 0.0) + height
    return bars


def _sequences() -> tuple[list[Bar], list[Bar]]:
    """Attention of each rank, by document: with documents where they were sampled, and as planned."""
    sampled = [(rank, length) for rank, lengths in enumerate(DOCUMENTS) for length in lengths]
    shape = AttentionShape(hidden=4096, heads=32, kv_heads=8, layers=32, ffn_hidden=14336)
    plan = plan_sequences(
        [length for _, length in sampled], Cluster.sheet("h100-8x400g").relabel(1, RANKS), shape=shape
    )
    before = [(rank, number, float(causal_area([length])), False) for number, (rank, length) in enumerate(sampled)]
    after = sorted((s.rank, s.sequence, float(s.area), s.rank != sampled[s.sequence][0]) for s in plan.attention)
    return _stacks(before), _stacks(after)


def _experts() -> tuple[list[Bar], list[Bar]]:
    """Tokens of each rank, by expert: at their homes, and with replicas."""
    home = contiguous_homes(len(TOKENS), RANKS)
    load = np.repeat(np.array(TOKENS)[None], RANKS, axis=0)
    served = split_tokens(load, plan_replicas(load, MACHINE, slots=ExpertConfig().replica_slots)).sum(0)
    before = [(int(home[expert]), expert, RANKS * tokens, False) for expert, tokens in enumerate(TOKENS)]
    after = [
        (rank, expert, float(served[expert, rank]), rank != home[expert])
        for rank in range(RANKS)
        for expert in range(len(TOKENS))
        if served[expert, rank]
    ]
    return _stacks(before), _stacks(after)


def _layers() -> tuple[list[Bar], list[Bar]]:
    """Seconds of each stage, by layer: equal numbers, and the best cut."""
    every = len(LAYERS) // RANKS
    first = [layer // every for layer in range(len(LAYERS))]
    plan = plan_stages(LAYERS, RANKS)
    before = [(stage, layer, LAYERS[layer], False) for layer, stage in enumerate(first)]
    after = [(s, layer, LAYERS[layer], first[layer] != s) for s, (chunk,) in enumerate(plan.chunks) for layer in chunk]
    return _stacks(before), _stacks(after)


def _draw(axes: plt.Axes, bars: Sequence[Bar], highest: float, title: str) -> None:
    for x, bottom, height, color, hatched in bars:
        hatch = "///" if hatched else None
        axes.bar(x, height, 0.8, bottom, color=COLORS[color % 20], hatch=hatch, edgecolor="white", lw=0.7)
    loads = np.bincount([int(bar[0]) for bar in bars], [bar[2] for bar in bars])
    axes.axhline(loads.mean(), color="#404040", lw=1, ls="--")
    axes.set_title(f"{title}: {loads.max() / loads.mean():.2f} of the mean", fontsize=8, loc="left")
    axes.set(ylim=(0, 1.05 * highest), yticks=[], xticks=range(RANKS))
    axes.spines[["top", "right", "left"]].set_visible(False)


# (lane, begin, end, text, color): one layer of a rank, and what goes on beside it
STEP = (
    (3, 0.0, 1.6, "batch cut\nby its plan", "#7fb59c"), (3, 1.6, 5.4, "attention", "#6f96d8"),
    (3, 5.4, 7.0, "router,\nexact split", "#e0b860"), (3, 7.0, 10.4, "experts and replicas", "#eb9f64"),
    (3, 10.4, 11.6, "next\nlayers", "#d0d0d0"), (3, 11.6, 15.6, "backward", "#d0d0d0"),
    (2, 1.6, 3.4, "keys,\nonce a node", "#6f96d8"), (2, 3.4, 5.4, "weights\nof replicas", "#eb9f64"),
    (2, 6.0, 7.2, "tokens", "#e0b860"), (2, 12.4, 15.2, "gradients of\nreplicas go home", "#eb9f64"),
    (1, 6.2, 12.4, "replicas of the next step are planned", "#eb9f64"),
    (2, 15.8, 18.6, "between steps,\nlayers move", "#b39ad1"),
)  # fmt: skip


def main(path: str) -> None:
    figure = plt.figure(figsize=(11, 7))
    grid = figure.add_gridspec(3, 3, height_ratios=(1.1, 1, 1), hspace=0.5, wspace=0.12)
    top = figure.add_subplot(grid[0, :])
    for lane, begin, end, text, color in STEP:
        top.barh(lane, end - begin - 0.05, 0.8, begin, color=color)
        top.text((begin + end) / 2, lane, text, ha="center", va="center", fontsize=8)
    top.set_yticks([3, 2, 1], ["compute", "links", "host"])
    top.set_xticks([])
    top.set_title(
        "One step of a rank: transfers run beside computation, plans beside the step", fontsize=10, loc="left"
    )
    top.spines[["top", "right", "bottom", "left"]].set_visible(False)
    for column, (name, unit, both) in enumerate(
        (
            ("attention by document", "rank", _sequences()),
            ("tokens by expert", "rank", _experts()),
            ("seconds by layer", "stage", _layers()),
        )
    ):
        highest = max(bottom + height for bars in both for _, bottom, height, *_ in bars)
        for row, (bars, when) in enumerate(zip(both, ("before", "after"), strict=True), 1):
            axes = figure.add_subplot(grid[row, column])
            _draw(axes, bars, highest, f"{name}, {when}")
        axes.set_xlabel(f"{unit} (hatched: from another {unit})", fontsize=8)
    save_figure(figure, path, bbox_inches="tight", facecolor="white")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit("usage: python -m benchmarks.together.how FIGURE.png")
    main(sys.argv[1])

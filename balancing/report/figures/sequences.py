"""Figure of one balanced batch: the tokens on each rank, and the work that follows."""

from typing import Any

import numpy as np
from matplotlib.patches import Patch

from balancing.report.figures.style import (
    BACKWARD,
    FORWARD,
    INK,
    LEVEL,
    MUTED,
    NEUTRAL,
    SURFACE,
    before_and_after,
    mark_every,
    new_figure,
    outline,
    svg,
)

__all__ = ["sequence_layout"]

_ZONES = {"on one rank": NEUTRAL, "inside a node": FORWARD, "over nodes": BACKWARD}


def sequence_layout(layout: dict[str, Any]) -> str:
    """SVG: a row for each rank with its pieces of documents, coloured by how far their document is spread, and beside
    it attention area over the mean, now and as Megatron-LM would cut the batch.

    layout  ranks, ranks_per_node; shards [[document, start, stop, rank]] of attention; area, area_before [rank], the
            latter empty where it is not known
    """
    ranks, per_node = layout["ranks"], layout["ranks_per_node"]
    held: dict[int, set[int]] = {}
    for document, _, _, rank in layout["shards"]:
        held.setdefault(document, set()).add(rank)

    def zone(document: int) -> str:
        if len(held[document]) == 1:
            return "on one rank"
        return "inside a node" if len({rank // per_node for rank in held[document]}) == 1 else "over nodes"

    with new_figure(height=1.1 + min(max(0.26 * ranks, 0.6), 5.2)) as figure:
        left, right = figure.subplots(1, 2, sharey=True, width_ratios=[3, 1])
        filled = np.zeros(ranks)
        line = 0.8 if len(layout["shards"]) < 40 * ranks else 0.0
        for document, start, stop, rank in layout["shards"]:
            left.barh(
                rank, stop - start, left=filled[rank], height=0.78, color=_ZONES[zone(document)],
                edgecolor=SURFACE, linewidth=line,
            )  # fmt: skip
            filled[rank] += stop - start
        area = np.asarray(layout["area"], dtype=float)
        mean = max(area.mean(), 1.0)
        right.barh(range(ranks), area / mean, height=0.78, color=NEUTRAL)
        before = np.asarray(layout["area_before"], dtype=float)
        if before.size == ranks:
            outline(right, before / mean, thick=0.78, along="y")
            right.legend(
                handles=before_and_after(NEUTRAL), loc="lower left", bbox_to_anchor=(0, 1.0), ncols=2, borderaxespad=0.2
            )
        right.axvline(1.0, color=INK, **LEVEL)
        for node in range(1, ranks // per_node):
            for axes in (left, right):
                axes.axhline(node * per_node - 0.5, color=MUTED, linewidth=0.8, linestyle=(0, (1, 2)))
        mark_every(
            left, [float(rank) for rank in range(ranks)], [str(rank) for rank in range(ranks)], room=20, along="y"
        )
        left.set_ylim(ranks - 0.5, -0.5)
        left.set_ylabel("context-parallel rank" if ranks > 6 else "CP rank")
        left.set_xlabel("tokens in attention; a piece of a document is a block")
        right.set_xlabel("attention area / mean")
        right.set_xlim(0, max(1.15, float(np.max([*area, *before])) / mean * 1.06))
        right.tick_params(axis="y", length=0)
        shown = {zone(document) for document in held}
        handles = [Patch(color=colour, label=f"document {name}") for name, colour in _ZONES.items() if name in shown]
        left.legend(handles=handles, loc="lower left", bbox_to_anchor=(0, 1.0), ncols=3, borderaxespad=0.2)
        return svg(figure, "sequences")

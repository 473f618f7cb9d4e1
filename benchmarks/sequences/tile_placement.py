"""Which node computes which tile of the triangle of queries x keys, and what then travels between nodes.

A sequence on N nodes is cut into 2 N blocks of equal length, of which node i holds blocks i and 2 N - 1 - i, as on a
zig-zag ring. A tile is a block of queries with a block of keys at or before it. Tiles may be on any node; simulated
annealing from a fixed seed looks for a placement of equal area whose busiest node sends and receives little.

What travels is counted once a node and in units of a token's keys and values, with multi-head attention:

    forward    queries 1/2, keys and values 1, partial outputs 1/2 (1 in float32)
    backward   queries and gradients of outputs 1, their gradients 1/2, keys and values 1, their gradients 1
"""

import functools
import math
import random
from typing import NamedTuple

__all__ = ["Placement", "place_tiles"]

_STEPS, _WARMEST, _COLDEST, _SWAPS = 600_000, 0.08, 0.00008, 0.6
_UNEVEN, _PENALTY, _MEAN = 0.03, 20.0, 0.5


class Placement(NamedTuple):
    """Tiles of a sequence on nodes.

    node: by (block of queries, block of keys).
    forward, backward: what the busiest node sends or receives, whichever is more; in units of the whole sequence's keys
        and values.
    keys: largest share of the sequence whose keys a node computes with, its own included.
    uneven: largest area of a node over the mean.
    """

    node: dict[tuple[int, int], int]
    forward: float
    backward: float
    keys: float
    uneven: float


class _Load:
    """Placed tiles, and what nodes send and receive for them."""

    def __init__(self, nodes: int, output: float) -> None:
        self.nodes, self.blocks = nodes, 2 * nodes
        self.owner = [min(block, self.blocks - 1 - block) for block in range(self.blocks)]
        # Forward and backward: (to the node that computes, back to the owner), for queries and for keys.
        self.weights = ((0.5, output), (1.0, 0.5)), ((1.0, 0.0), (1.0, 1.0))
        # Tiles of each node by block of queries and by block of keys.
        self.used = [[[0] * self.blocks for _ in range(nodes)] for _ in range(2)]
        self.received, self.sent = ([[0.0] * nodes for _ in range(2)] for _ in range(2))  # [pass][node]
        self.area = [0.0] * nodes
        self.node: dict[tuple[int, int], int] = {}
        for queries in range(self.blocks):
            for keys in range(queries + 1):
                self.node[queries, keys] = self.owner[queries]
                self._count((queries, keys), self.owner[queries], 1)

    def move(self, tile: tuple[int, int], node: int) -> None:
        self._count(tile, self.node[tile], -1)
        self._count(tile, node, 1)
        self.node[tile] = node

    def _count(self, tile: tuple[int, int], node: int, sign: int) -> None:
        self.area[node] += sign * (0.5 if tile[0] == tile[1] else 1.0)
        for side, block in enumerate(tile):
            used = self.used[side][node]
            used[block] += sign
            owner = self.owner[block]
            if owner == node or used[block] != (1 if sign > 0 else 0):
                continue
            for at, (there, back) in enumerate(self.weights[side]):
                self.received[at][node] += sign * there
                self.sent[at][owner] += sign * there
                self.received[at][owner] += sign * back
                self.sent[at][node] += sign * back

    @property
    def uneven(self) -> float:
        return max(self.area) / (sum(self.area) / self.nodes)

    def busiest(self, at: int) -> float:
        """Of a pass: what the busiest node sends or receives, in units of the whole sequence."""
        return max(*self.received[at], *self.sent[at]) / self.blocks

    def energy(self) -> float:
        mean, most = sum(self.area) / self.nodes, 1.0 + _UNEVEN
        over = sum(max(0.0, area / mean - most) for area in self.area)
        every = (sum(self.received[0]) + sum(self.received[1])) / self.nodes / self.blocks
        return self.busiest(0) + self.busiest(1) + _MEAN * every + _PENALTY * over

    def placement(self) -> Placement:
        keys = max(sum(map(bool, used)) for used in self.used[1]) / self.blocks
        return Placement(dict(self.node), self.busiest(0), self.busiest(1), keys, self.uneven)


@functools.lru_cache
def place_tiles(nodes: int, *, float32_outputs: bool = False, steps: int = _STEPS) -> Placement:
    """Tiles of a sequence that lies on `nodes` nodes.

    float32_outputs: whether partial outputs travel in float32 instead of the type of queries.
    steps: of annealing; without any, all tiles of a block of queries are on the node that holds it.
    """
    load, draw = _Load(nodes, 1.0 if float32_outputs else 0.5), random.Random(nodes)
    tiles = sorted(load.node)
    beside = {tile: [other for other in tiles if other[0] == tile[0] or other[1] == tile[1]] for tile in tiles}
    energy, best = load.energy(), load.placement()
    least = energy
    for step in range(steps):
        warm = _WARMEST * (_COLDEST / _WARMEST) ** (step / steps)
        tile = draw.choice(tiles)
        home, node = load.node[tile], load.node[draw.choice(beside[tile])]
        if node == home:
            continue
        swapped = None
        if draw.random() < _SWAPS:
            swapped = next((other for other in draw.choices(tiles, k=4 * nodes) if load.node[other] == node), None)
        load.move(tile, node)
        if swapped is not None:
            load.move(swapped, home)
        found = load.energy()
        if found <= energy or draw.random() < math.exp((energy - found) / warm):
            energy = found
            if found < least and load.uneven <= 1.0 + _UNEVEN:
                least, best = found, load.placement()
        else:
            load.move(tile, home)
            if swapped is not None:
                load.move(swapped, node)
    return best

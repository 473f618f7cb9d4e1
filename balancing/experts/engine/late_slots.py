"""Late slots: replicas of one pass, which are decided inside the layer (`balancing.experts.late`).

A rank has a few late slots, as a rule one, which all MoE layers of a model chunk share, in two buffers that alternate
from layer to layer, as shared slots do. Which experts are in them differs from pass to pass. A forward pass knows it
once the load of its micro-batch is gathered: weights set out then, beside the tokens, and are waited for before the
experts run. A backward pass needs the same weights again. They are sent while the layer behind computes its backward
pass, unless they are still in the buffer; so only a forward pass waits. Gradients return after each backward pass.

Example: three layers, two micro-batches. W1a: the weights of layer 1 for micro-batch a. Layers 2 and 1 of a backward
pass that follows its forward pass find theirs in the buffers.

    pass     F0a  F1a  F2a  B2a  B1a  B0a  F0b  ...
    begins   W0a  W1a  W2a       W0a
    ends                    G2a  G1a  G0a

All ranks of the group must call the same methods in the same order.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from balancing.experts.engine.chains import Chain
from balancing.experts.engine.slots import ReplicaSlots
from balancing.experts.placement import ReplicaPlacement

__all__ = ["LateChains", "LateSlots", "late_chains"]


@dataclass(eq=False)
class LateChains:
    """The late copies of one pass, as one rank sees them. chains: of each expert with a late copy, home first."""

    chains: list[Chain]


def late_chains(home: np.ndarray, late: np.ndarray, rank: int) -> LateChains | None:
    """The late copies of a pass; None if it has none.

    home: int [expert], the rank of each.
    late: int [rank, late slot], the expert in each late slot, -1 in empty ones.
    rank: this rank.
    """
    chains = []
    for expert in np.unique(late[late >= 0]).tolist():
        ranks = (int(home[expert]), *np.flatnonzero((late == expert).any(1)).tolist())
        place = ranks.index(rank) if rank in ranks else None
        chains.append(Chain(expert, ranks, place, late[rank].tolist().index(expert) if place else None))
    return LateChains(chains) if chains else None


class LateSlots(ReplicaSlots):
    """The late slots of this rank for the MoE layers of one model chunk. Parameters and errors as of `ReplicaSlots`,
    with a process group of their own.

    `HomeExperts.complete` is not called: `finish` adds the gradients of a layer to those of its home experts.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, shared=True, **kwargs)
        layers = range(len(self._layers))
        self._ahead: list[deque[LateChains | None]] = [deque() for _ in layers]  # of passes, until their backward pass
        self._placed: list[LateChains | None] = [None] * len(self._layers)  # of the pass in progress, or of the last
        self.copies = [0] * len(self._layers)  # of this iteration, on all ranks and in all micro-batches

    def begin_step(self, placements: Sequence[ReplicaPlacement], micro_batches: int) -> None:
        """Begin an iteration. placements: as of `ReplicaSlots`; their replicas are not in these slots."""
        assert not self._leaving, "transfers of the last iteration are not finished"
        self._in_progress, self.started, self.copies = True, 0, [0] * len(self._layers)
        self._waits.clear()
        self._content = [None] * len(self._content)
        for waiting in self._ahead:
            waiting.clear()
        for number, layer in enumerate(self._layers):
            layer.backwards = layer.moved_bytes = 0
            self._place(number, None)

    def begin_forward(self, number: int, late: LateChains | None, *, again: bool) -> None:
        """The load of a pass of layer `number` is known. Starts sending the weights of its late copies.

        late: its late copies, the same object in all passes of a micro-batch; None without any.
        again: whether the pass recomputes an earlier one.
        """
        if not again:
            self._ahead[number].append(late)
            self.copies[number] += sum(chain.replicas for chain in late.chains) if late else 0
        self._send(number, late)

    def begin_backward(self, number: int, late: LateChains | None) -> None:
        """A backward pass comes to layer `number`. Starts sending the weights for the layer before. late: as in
        `begin_forward`."""
        following = self._ahead[number].popleft()
        assert following is late, "backward passes in another order than forward passes"
        self._send(number, late)
        if late is not None:
            self.acquire(number, forward=False)
        if number and self._ahead[number - 1] and self._layers[number - 1].buffer != self._layers[number].buffer:
            self._send(number - 1, self._ahead[number - 1][0])

    def _send(self, number: int, late: LateChains | None) -> None:
        self._place(number, late)
        if late is not None and self._content[self._layers[number].buffer] != number:
            self._finish_sends()  # of what the buffer had
            self.prefetch(number)

    def _place(self, number: int, late: LateChains | None) -> None:
        if self._placed[number] is late:
            return
        layer, self._placed[number] = self._layers[number], late
        layer.place([] if late is None else late.chains)
        if self._content[layer.buffer] == number:
            self._content[layer.buffer] = None
        for relay in layer.fetching:  # for a pass that did not come
            self._wait(relay.wait_sent)
        layer.fetching.clear()

    def _prefetch_after(self, number: int, forward: bool) -> None:
        """Nothing: `begin_backward` sends ahead what it knows."""

    def finish(self, number: int) -> None:
        """Add gradients of layer `number` that are in flight to those of its home experts."""
        self._finish_reduction(number)

    def _check_passes(self) -> None:
        """Passes without late copies return nothing."""

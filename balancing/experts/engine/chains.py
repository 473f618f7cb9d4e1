"""One rank's part in the chains of a layer: the messages that it receives and sends, and their tags.

Along a chain, an expert's weights leave the home rank and its replicas' gradients return. `ReplicaPlacement.chains` has
the order of ranks.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from balancing.experts.engine.relay import Hop, split_pieces
from balancing.experts.placement import ReplicaPlacement

__all__ = ["Chain", "Numbers", "chains_of", "hops_of"]

_MOST_PIECES = 1 << 9  # largest number of pieces of one expert (8 GiB), which message tags have room for


@dataclass(frozen=True)
class Chain:
    """The chain of one expert.

    expert: its logical number.
    ranks: the ranks that hold the expert, in the order in which they relay it, home first.
    place: position of this rank in the chain; None if this rank is not in the chain.
    slot: slot of this rank's replica; None at the home and if this rank is not in the chain.
    """

    expert: int
    ranks: tuple[int, ...]
    place: int | None
    slot: int | None

    @property
    def replicas(self) -> int:
        """Number of replicas that the chain reaches."""
        return len(self.ranks) - 1


@dataclass(frozen=True)
class Numbers:
    """Tags of the messages of one layer's weights, or of its gradients.

    layer: number of the layer; layers that share a process group have different numbers.
    homeward: True for gradients, which travel to the home rank; False for weights.
    experts: number of experts of a layer.
    """

    layer: int
    homeward: bool
    experts: int

    def first(self, expert: int) -> int:
        """Tag of the message with the first piece of `expert`; the tags of its other pieces follow. torch keeps tags in
        32 bits."""
        number = ((2 * self.layer + self.homeward) * self.experts + expert) * _MOST_PIECES
        assert number < 1 << 31, f"layer {self.layer} of {self.experts} experts"
        return number


def chains_of(placement: ReplicaPlacement, rank: int) -> list[Chain]:
    """The chains of all experts with replicas, as `rank` sees them."""
    chains = []
    for expert, ranks in placement.chains.items():
        place = ranks.index(rank) if rank in ranks else None
        slot = placement.slots_of(rank).index(expert) if place else None
        chains.append(Chain(expert, ranks, place, slot))
    return chains


def hops_of(
    chains: Sequence[Chain],
    numbers: Numbers,
    tensors: Callable[[Chain], tuple[torch.Tensor, torch.Tensor | None]],
) -> list[Hop]:
    """This rank's hops of a layer.

    chains: the chains of the experts that are sent.
    numbers: tags of the messages. Gradients travel the chain from its end.
    tensors: chain -> the flat tensor that is received and sent, and the tensor that is added in between or None.
    """
    hops = []
    for chain in chains:
        if chain.place is None:
            continue
        ranks, place = chain.ranks, chain.place
        if numbers.homeward:
            ranks, place = ranks[::-1], len(ranks) - 1 - place
        source = ranks[place - 1] if place else None
        target = ranks[place + 1] if place + 1 < len(ranks) else None
        relayed, added = tensors(chain)
        pieces = split_pieces(relayed)
        assert len(pieces) <= _MOST_PIECES, "an expert of that size"
        added_pieces = [None] * len(pieces) if added is None else split_pieces(added)
        first = numbers.first(chain.expert)
        for number, (piece, add) in enumerate(zip(pieces, added_pieces, strict=True)):
            hops.append(Hop(source, target, piece, add, tag=first + number, turn=place + number))
    return hops

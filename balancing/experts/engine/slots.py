"""Moves expert weights to their replicas and the replicas' gradients home, under the computation of other layers.

A replica lives in a slot of a rank for one iteration at most (Pro-Prophet, section IV). Its weights come from the home
rank (`Trans`); its gradients go back there and are added to the home expert's own before anybody else sees them
(`Agg`). Both are handed on from rank to rank (`balancing.experts.engine.relay`), so that an expert leaves its home
once, however many replicas it has, and gradients are added in a fixed order, so that a run repeats bit for bit.
Replicas are in no optimizer and no checkpoint.

Two ways to keep slots. Resident: a buffer for each layer; weights are copied once an iteration and gradients reduced
once, whatever the number of micro-batches. Shared: two buffers for all layers; while one layer computes, the next one's
weights arrive in the other. Weights are sent again for each pass, gradients reduced after each backward pass.

Every rank of the group calls the same methods in the same order, which the order of layers and micro-batches gives.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from balancing.clock import CpuClock, CudaClock, DeviceClock
from balancing.experts.engine.relay import Hop, Relay, split_pieces
from balancing.experts.placement import ReplicaPlacement

__all__ = ["ReplicaSlots", "TransferStatistics"]

Parameters = Sequence[torch.Tensor]  # of one expert, in a fixed order

_MOST_PIECES = 1 << 12  # of one expert under way, for the numbers of messages


@dataclass
class TransferStatistics:
    """What was moved since the last look, on this rank: bytes sent, and seconds for which the rank, or the stream it
    computes on, waited for transfers."""

    weight_bytes: int = 0
    gradient_bytes: int = 0
    exposed_seconds: float = 0.0


@dataclass(frozen=True)
class _Chain:
    """An expert and the ranks that hold it in the order in which they hand it on, home first.

    place, slot: this rank's place in the order and the slot that holds the replica; None where it has no part.
    """

    expert: int
    ranks: tuple[int, ...]
    place: int | None
    slot: int | None


class _Reduction(NamedTuple):
    """A layer's gradients on their way. received: (home expert, the sum that comes for it)."""

    relay: Relay
    received: list[tuple[int, torch.Tensor]]


class ReplicaSlots:
    """The replica slots of this rank for the MoE layers of one model chunk.

    homes      [layer][home expert] -> its parameters; all experts alike
    slots      replicas this rank can hold for a layer
    group      expert-parallel group, used for nothing else at the same time
    shared     two buffers for all layers instead of one for each
    gradient   home parameter -> the fp32 (or float64) tensor that its gradient is accumulated in
    final      called with a layer's number before the weights of its homes are read
    complete   called with a layer's number when the gradients of its replicas are in their homes, after each backward
               pass; layers come in the order of `end_pass`
    """

    def __init__(
        self,
        homes: Sequence[Sequence[Parameters]],
        slots: int,
        group: dist.ProcessGroup,
        *,
        shared: bool,
        gradient: Callable[[torch.Tensor], torch.Tensor],
        final: Callable[[int], None],
        complete: Callable[[int], None],
    ) -> None:
        self.homes, self.slots, self.shared = homes, slots, shared
        self._statistics = TransferStatistics()
        self._group, self._gradient = group, gradient
        self._final, self._complete = final, complete
        self._rank = dist.get_rank(group)
        self._homes_per_rank = len(homes[0])
        first = homes[0][0]
        self._shapes = [p.shape for p in first]
        self._experts = self._homes_per_rank * dist.get_world_size(group)
        self._size = sum(p.numel() for p in first)
        self._dtype, self._device = first[0].dtype, first[0].device
        self._clock: DeviceClock = CudaClock() if self._device.type == "cuda" else CpuClock()
        self._waits: list[tuple[Any, Any]] = []  # marks of the clock
        self._gradient_dtype = torch.float64 if self._dtype is torch.float64 else torch.float32
        buffers = min(2, len(homes)) if shared else len(homes)
        self._weights = torch.zeros(buffers, slots, self._size, dtype=self._dtype, device=self._device)
        # Leaves of autograd. They share the buffers' memory and not their version counters: a shared buffer is written
        # again between a forward pass and its backward pass, with the very weights the backward pass needs.
        self._leaves = [
            [self._views(self._weights[self._buffer(layer)].data[slot]) for slot in range(slots)]
            for layer in range(len(homes))
        ]
        self._accumulated: list[torch.Tensor | None] = [None] * len(homes)
        self._chains: list[list[_Chain]] = [[] for _ in homes]
        self._content: list[int | None] = [None] * buffers
        self._fetching: dict[int, list[Relay]] = {}
        self._leaving: list[Relay] = []  # has brought what this rank receives and may still be sending
        self._reducing: dict[int, _Reduction] = {}
        self._passed: list[int] = []  # layers with a backward pass whose gradients may be on their way
        self._backwards = [0] * len(homes)
        self._moved = [0] * len(homes)
        self._micro_batches = 1

    @staticmethod
    def bytes_needed(homes: Sequence[Sequence[Parameters]], slots: int, *, shared: bool) -> int:
        """Bytes that the buffers of weights and, where they are kept, of gradients take on this rank."""
        size = sum(p.numel() for p in homes[0][0])
        weight, gradient = homes[0][0][0].element_size(), max(4, homes[0][0][0].element_size())
        layers = len(homes)
        buffers = min(2, layers) if shared else layers  # of shared gradients one is filled while the other leaves
        return slots * size * buffers * (weight + gradient)

    def _views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        pieces = flat.split([shape.numel() for shape in self._shapes])
        return [p.view(shape).detach().requires_grad_() for p, shape in zip(pieces, self._shapes, strict=True)]

    def _buffer(self, layer: int) -> int:
        return layer % 2 if self.shared else layer

    # Trans.

    def begin_step(self, placements: Sequence[ReplicaPlacement], micro_batches: int) -> None:
        """The weights of this iteration are final, or on their way. Start with the replicas of the first layer that has
        some.

        placements: of each layer, homes in contiguous blocks.
        micro_batches: backward passes that each layer will make in this iteration.
        """
        assert not (self._fetching or self._leaving or self._reducing or self._passed), (
            "transfers of the last iteration are not finished"
        )
        self._waits.clear()
        self._chains = [self._chains_of(placement) for placement in placements]
        self._content = [None] * len(self._content)
        self._backwards = [0] * len(self.homes)
        self._moved = [0] * len(self.homes)
        self._micro_batches = micro_batches
        first = self._first_used(range(len(self.homes)))
        if first is not None:
            self.prefetch(first)

    def _chains_of(self, placement: ReplicaPlacement) -> list[_Chain]:
        chains = []
        for expert, ranks in placement.chains.items():
            place = ranks.index(self._rank) if self._rank in ranks else None
            slot = placement.slots_of(self._rank).index(expert) if place else None
            chains.append(_Chain(expert, ranks, place, slot))
        return chains

    def _hops(
        self, kind: int, layer: int, chains: list[_Chain], buffers: Callable[[_Chain], tuple[torch.Tensor, Any]]
    ) -> list[Hop]:
        """This rank's part in handing on the layer's weights (kind 0, home first) or gradients (1, home last).

        buffers: for a chain what is received and sent, flat, and what is added in between or None.
        """
        hops = []
        for chain in chains:
            if chain.place is None:
                continue
            ranks, place = chain.ranks, chain.place
            if kind == 1:
                ranks, place = ranks[::-1], len(ranks) - 1 - place
            source = ranks[place - 1] if place else None
            target = ranks[place + 1] if place + 1 < len(ranks) else None
            passed, added = (None if flat is None else split_pieces(flat) for flat in buffers(chain))
            assert passed is not None and len(passed) <= _MOST_PIECES, "an expert of that size"
            first = ((2 * layer + kind) * self._experts + chain.expert) * _MOST_PIECES
            for number, piece in enumerate(passed):
                add = None if added is None else added[number]
                hops.append(Hop(source, target, piece, add, tag=first + number, turn=place + number))
        return hops

    def _flat_home(self, layer: int, expert: int) -> torch.Tensor:
        return torch.cat([p.detach().reshape(-1) for p in self.homes[layer][expert % self._homes_per_rank]])

    def prefetch(self, layer: int) -> None:
        """Start bringing the weights of `layer`'s replicas, unless they are here or under way."""
        buffer = self._buffer(layer)
        if self._content[buffer] == layer:
            return
        # A layer that just got its first replicas (`add`) takes a shared buffer from one that was to come after it.
        for other in [other for other in self._fetching if self._buffer(other) == buffer]:
            for relay in self._fetching.pop(other):
                self._wait(relay.wait_sent)
        self._content[buffer] = layer
        self._fetch(layer, self._chains[layer])

    def _fetch(self, layer: int, chains: list[_Chain]) -> None:
        self._final(layer)
        weights = self._weights[self._buffer(layer)].data
        hops = self._hops(
            0,
            layer,
            chains,
            lambda chain: (
                self._flat_home(layer, chain.expert) if chain.slot is None else weights[chain.slot],
                None,
            ),
        )
        self._statistics.weight_bytes += sum(hop.sent_bytes for hop in hops)
        self._moved[layer] += sum(len(chain.ranks) - 1 for chain in chains) * self._size * self._dtype.itemsize
        self._fetching.setdefault(layer, []).append(Relay(hops, self._group))

    def add(self, layer: int, placement: ReplicaPlacement) -> None:
        """Fill empty slots of `layer` before its first pass of the iteration, whose experts will wait for the weights.

        placement: may differ from that of `begin_step` only where slots were empty.
        """
        assert not self._backwards[layer], "replicas are added before the first pass"
        before = {chain.expert: chain.ranks for chain in self._chains[layer]}
        chains = self._chains_of(placement)
        self._chains[layer] = chains
        if self._content[self._buffer(layer)] != layer:
            return  # nothing is here or under way yet, so that the first pass will bring all
        missing = []
        for chain in chains:
            known = set(before.get(chain.expert, ())[1:])
            ranks = tuple(rank for rank in chain.ranks if rank not in known)
            if len(ranks) > 1:
                place = ranks.index(self._rank) if self._rank in ranks else None
                missing.append(_Chain(chain.expert, ranks, place, chain.slot))
        self._fetch(layer, missing)

    def acquire(self, layer: int, *, forward: bool) -> None:
        """Have the weights of `layer`'s replicas in its slots, and start bringing those of the next layer with
        replicas, in the forward or the backward direction."""
        self._finish_sends()
        self.prefetch(layer)
        for relay in self._fetching.pop(layer, []):
            self._wait(relay.wait_received)
            self._leaving.append(relay)
        self._prefetch_after(layer, forward)

    def _prefetch_after(self, layer: int, forward: bool) -> None:
        following = self._first_used(range(layer + 1, len(self.homes)) if forward else range(layer - 1, -1, -1))
        if following is not None and self._buffer(following) != self._buffer(layer):
            self.prefetch(following)

    def _first_used(self, layers: range) -> int | None:
        return next((layer for layer in layers if self.is_used(layer)), None)

    def is_used(self, layer: int) -> bool:
        """True if some rank of the group holds a replica of an expert of `layer` in this iteration."""
        return bool(self._chains[layer])

    def moved_bytes(self, layer: int) -> int:
        """Bytes that all ranks together have sent for `layer` in this iteration."""
        return self._moved[layer]

    def _replicas(self, layer: int) -> int:
        return sum(len(chain.ranks) - 1 for chain in self._chains[layer])

    def leaves(self, layer: int) -> list[list[torch.Tensor]]:
        """[slot] -> the parameters that `acquire` filled, which gather gradients."""
        return self._leaves[layer]

    def _finish_sends(self) -> None:
        for relay in self._leaving:
            self._wait(relay.wait_sent)
        self._leaving.clear()

    def _wait(self, wait: Callable[[], None]) -> None:
        begin = self._clock.mark()
        wait()
        self._waits.append((begin, self._clock.mark()))

    # Agg.

    def accumulate_gradients(self, layer: int) -> None:
        """A backward pass through `layer`'s replicas has ended: take their gradients, and send them home when due."""
        if self.shared:  # there is room for the gradients of one layer on their way
            for other in list(self._reducing):
                self._bring_home(other)
        self._backwards[layer] += 1
        accumulated = self._accumulated[layer]
        for chain in self._chains[layer]:
            if chain.slot is None:
                continue
            if accumulated is None:
                accumulated = torch.zeros(self.slots, self._size, dtype=self._gradient_dtype, device=self._device)
            start = 0
            for leaf in self._leaves[layer][chain.slot]:
                if leaf.grad is not None:
                    accumulated[chain.slot, start : start + leaf.numel()].add_(leaf.grad.reshape(-1))
                start += leaf.numel()
        for slot in self._leaves[layer]:
            for leaf in slot:
                leaf.grad = None
        self._accumulated[layer] = accumulated
        if self.shared or self._backwards[layer] == self._micro_batches:
            self._start_reduction(layer)

    def _start_reduction(self, layer: int) -> None:
        accumulated = self._accumulated[layer]
        self._accumulated[layer] = None
        received: list[tuple[int, torch.Tensor]] = []

        def buffers(chain: _Chain) -> tuple[torch.Tensor, torch.Tensor | None]:
            own = None
            if chain.slot is not None:
                assert accumulated is not None
                own = accumulated[chain.slot]
                if chain.ranks[-1] == self._rank:
                    return own, None
            coming = torch.empty(self._size, dtype=self._gradient_dtype, device=self._device)
            if own is None:
                received.append((chain.expert % self._homes_per_rank, coming))
            return coming, own

        hops = self._hops(1, layer, self._chains[layer], buffers)
        self._statistics.gradient_bytes += sum(hop.sent_bytes for hop in hops)
        self._moved[layer] += self._replicas(layer) * self._size * self._gradient_dtype.itemsize
        assert layer not in self._reducing, "a layer has two sums on their way"
        self._reducing[layer] = _Reduction(Relay(hops, self._group), received)

    def end_pass(self, layer: int) -> None:
        """A backward pass through the experts of `layer` has ended, homes and replicas; also where it has no replicas.

        Gradients have the time of two more layers to come home. Then the layer is complete: at the same point of the
        backward pass whatever the plans of this group and of others are.
        """
        self._passed.append(layer)
        while len(self._passed) > 2:
            self._finish(self._passed.pop(0))

    def _finish(self, layer: int) -> None:
        self._bring_home(layer)
        self._complete(layer)

    def _bring_home(self, layer: int) -> None:
        reduction = self._reducing.pop(layer, None)
        if reduction is None:
            return
        relay, received = reduction
        if received:
            self._wait(relay.wait_received)
        for home, flat in received:
            pieces = flat.split([shape.numel() for shape in self._shapes])
            for parameter, piece in zip(self.homes[layer][home], pieces, strict=True):
                self._gradient(parameter).add_(piece.view(parameter.shape))
        self._leaving.append(relay)

    def take_statistics(self) -> TransferStatistics:
        """What was moved since the last call, waits since the step began. Where these are a stream's, it waits for the
        last of them."""
        taken, self._statistics = self._statistics, TransferStatistics()
        if self._waits and self._device.type == "cuda":
            self._waits[-1][1].synchronize()
        taken.exposed_seconds = sum(self._clock.seconds(begin, begin, end)[1] for begin, end in self._waits)
        self._waits.clear()
        return taken

    def end_step(self) -> None:
        """All backward passes of the iteration have run: have every gradient at home."""
        # Last those whose input needs no gradient, so that no backward pass came to its end.
        for layer in [*self._passed, *reversed(range(len(self.homes)))]:
            self._finish(layer)
        self._passed.clear()
        for relays in self._fetching.values():  # fetched for a pass that did not come
            self._leaving += relays
        self._fetching.clear()
        self._finish_sends()
        assert all(n in (0, self._micro_batches) for n in self._backwards), "a layer missed a backward pass"

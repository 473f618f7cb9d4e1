"""Replica slots: send expert weights to replicas and return the replicas' gradients, while other layers compute.

A replica lives in a slot for at most one iteration (Pro-Prophet, arXiv 2411.10003, section IV). Its weights are sent by
the home rank (`Trans`); its gradients are returned there and added to the home expert's own before anything else reads
them (`Agg`). Both are relayed from rank to rank (`balancing.experts.engine.relay`), so that an expert leaves its home
once, however many replicas it has, and gradients are added in a fixed order, so that runs repeat bit for bit. Replicas
are in no optimizer and no checkpoint.

Slots have two modes. Resident: each layer has its own buffer; weights are sent once an iteration and gradients returned
once, whatever the number of micro-batches. Shared: two buffers serve all layers; while one layer computes, the next
layer's weights arrive in the other. Weights are sent for each pass, gradients returned after each backward pass. Where
forward passes alternate with backward passes of another micro-batch, layer by layer, one is in the first half of the
layers while the other is in the second, and each half has two buffers.

Transfers run while the rank computes, in turns that are posted when the links are free (`balancing.experts.engine.
posting`).

Every rank of the group calls the same methods in the same order, which the order of layers and micro-batches gives.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from balancing.clock import CpuClock, CudaClock, DeviceClock
from balancing.experts.engine.posting import Postings
from balancing.experts.engine.relay import Hop, Relay, split_pieces
from balancing.experts.engine.weights import Parameters, WeightFormat, WeightLayout
from balancing.experts.placement import ReplicaPlacement

__all__ = ["ReplicaSlots", "TransferStatistics"]

_MOST_PIECES = 1 << 12  # of one expert; message numbers leave room for as many


@dataclass
class TransferStatistics:
    """Transfers of this rank since the statistics were last taken.

    weight_bytes, gradient_bytes: bytes sent.
    exposed_seconds: time for which this rank, or the stream that it computes on, waited for transfers.
    """

    weight_bytes: int = 0
    gradient_bytes: int = 0
    exposed_seconds: float = 0.0


@dataclass(frozen=True)
class _Chain:
    """The chain of one expert.

    expert: its logical number.
    ranks: the ranks that hold it in the order in which they relay it, home first.
    place: position of this rank in the chain; None if it has no part.
    slot: slot of this rank's replica; None at the home and without a part.
    """

    expert: int
    ranks: tuple[int, ...]
    place: int | None
    slot: int | None


class _Reduction(NamedTuple):
    """A layer's gradients in flight.

    relay: their hops.
    received: (home expert, sum of its replicas' gradients) of this rank's home experts with replicas.
    """

    relay: Relay
    received: list[tuple[int, torch.Tensor]]


def _buffers(layers: int, shared: bool, alternating: bool) -> int:
    return min(4 if alternating else 2, layers) if shared else layers


class ReplicaSlots:
    """The replica slots of this rank for the MoE layers of one model chunk.

    homes: [layer][home expert] -> its parameters; all experts have the same shapes.
    slots: maximal number of replicas of a layer on this rank.
    group: expert-parallel group, used for nothing else at the same time.
    shared: whether two buffers serve all layers, instead of one buffer for each layer.
    alternating: whether a forward and a backward pass alternate, for which shared slots have four buffers.
    gradient: home parameter -> the fp32 (or float64) tensor that its gradient is accumulated in.
    fused: whether products with a replica's weight add its gradient to the attribute `main_grad` of the weight, which
        has the type of `gradient` then, rather than to `grad`.
    format: how parameters are stored.
    final: called with a layer's number before the weights of its homes are read.
    expert_share: part of a layer's compute that is its experts'. None posts transfers whole.
    first_layer: number of the first layer in messages; slots that share a group must not have a number twice.
    complete: called with a layer's number after each backward pass, when the gradients of its replicas have been added
        to those of their homes; layers come in the order of `end_pass`.
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
        fused: bool = False,
        format: WeightFormat | None = None,
        alternating: bool = False,
        expert_share: float | None = None,
        first_layer: int = 0,
    ) -> None:
        self.homes, self.slots, self.shared = homes, slots, shared
        self._statistics = TransferStatistics()
        self._gradient, self._first_layer = gradient, first_layer
        self._final, self._complete = final, complete
        self._rank = dist.get_rank(group)
        self._homes_per_rank = len(homes[0])
        first = homes[0][0]
        self._shapes = [p.shape for p in first]
        self._experts = self._homes_per_rank * dist.get_world_size(group)
        self._size = sum(p.numel() for p in first)
        self._format = format or WeightFormat()
        self._layout = WeightLayout(first, self._format)
        self._device = first[0].device
        self._clock: DeviceClock = CudaClock() if self._device.type == "cuda" else CpuClock()
        self._waits: list[tuple[Any, Any]] = []  # begin and end, marks of the clock
        self._fused = fused
        self._gradient_dtype = torch.float64 if first[0].dtype is torch.float64 else torch.float32
        if fused:
            self._gradient_dtype = gradient(first[0]).dtype
        buffers = _buffers(len(homes), shared, alternating)
        self._weights = torch.zeros(buffers, slots, self._layout.size, dtype=self._layout.dtype, device=self._device)
        # Leaves of autograd. They share the buffers' memory but not their version counters: a shared buffer is written
        # again between a forward pass and its backward pass, and holds the same weights when the backward pass runs.
        self._leaves = [
            [self._layout.replicas(first, self._weights[self._buffer(layer)].data[slot]) for slot in range(slots)]
            for layer in range(len(homes))
        ]
        self._accumulated: list[torch.Tensor | None] = [None] * len(homes)
        self._chains: list[list[_Chain]] = [[] for _ in homes]
        self._content: list[int | None] = [None] * buffers
        # The variable is the same on all ranks.
        one_queue = self._weights.is_cuda and os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1"
        self._postings = Postings(group, turn_by_turn=one_queue, expert_share=expert_share)
        self._fetching: dict[int, list[Relay]] = {}
        self._leaving: list[Relay] = []  # received, and perhaps still sending
        self._reducing: dict[int, _Reduction] = {}
        self._passed: list[int] = []  # layers after a backward pass whose gradients may be in flight
        self._backwards = [0] * len(homes)
        self._moved = [0] * len(homes)
        self._micro_batches = 1

    @staticmethod
    def bytes_needed(
        homes: Sequence[Sequence[Parameters]],
        slots: int,
        *,
        shared: bool,
        alternating: bool = False,
        format: WeightFormat | None = None,
        copies: int = 0,
    ) -> int:
        """Bytes of memory that replicas take on this rank, with gradients.

        homes, slots, shared, alternating, format: as in `ReplicaSlots`.
        copies: bytes that the layers keep for each number of a replica beside the slots, such as a quantized weight.
        """
        size = sum(p.numel() for p in homes[0][0])
        stored = WeightLayout(homes[0][0], format or WeightFormat()).nbytes
        gradient = size * max(4, homes[0][0][0].element_size())
        # Of shared gradients, one is filled while the other is sent.
        weights, gradients = (_buffers(len(homes), shared, more) for more in (alternating, False))
        return slots * (weights * stored + gradients * gradient + len(homes) * size * copies)

    def _buffer(self, layer: int) -> int:
        buffers, layers = len(self._weights), len(self.homes)
        if buffers == layers:
            return layer
        return layer % 2 + (2 if buffers > 2 and layer >= layers / 2 else 0)

    # Trans.

    def begin_step(self, placements: Sequence[ReplicaPlacement], micro_batches: int) -> None:
        """Begin an iteration, whose weights are final or being gathered: send those of the first layer with replicas.

        placements: one for each layer, with homes in contiguous blocks.
        micro_batches: number of backward passes of each layer in this iteration.
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
        """This rank's hops of a layer.

        kind: 0 for weights, which leave the home; 1 for gradients, which go there.
        layer: the layer's number.
        chains: of the experts that are sent.
        buffers: chain -> the flat tensor that is received and sent, and the one that is added in between or None.
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
            number = 2 * (self._first_layer + layer) + kind
            first = (number * self._experts + chain.expert) * _MOST_PIECES
            for at, piece in enumerate(passed):
                add = None if added is None else added[at]
                hops.append(Hop(source, target, piece, add, tag=first + at, turn=place + at))
        return hops

    def _flat_home(self, layer: int, expert: int) -> torch.Tensor:
        return self._layout.flat(self.homes[layer][expert % self._homes_per_rank])

    def _relay(
        self, hops: list[Hop], chains: list[_Chain], size: int, dtype: torch.dtype, shares: Sequence[float]
    ) -> Relay:
        """Start this rank's hops of `chains`, which are the same on all ranks.

        size, dtype: of what is sent of each expert.
        shares: as `Postings.start` has them.
        """
        turns = 0
        if chains:
            pieces = len(split_pieces(torch.empty(size, dtype=dtype, device="meta")))
            turns = max(len(chain.ranks) for chain in chains) - 1 + pieces - 1
        return self._postings.start(hops, turns, shares)

    @property
    def turn_by_turn(self) -> bool:
        """Whether turns are posted one at a time, by `advance`."""
        return self._postings.turn_by_turn

    def advance(self) -> None:
        """Post the next turn of the oldest transfer, where they are posted one at a time.

        Called on all ranks at the same points, with compute in between. Whoever waits for a transfer posts the rest.
        """
        self._postings.advance()

    def begin_compute(self) -> None:
        """Post the next part of each transfer, where they are posted in parts: a stretch of compute begins.

        Called on all ranks at the same points. Whoever waits for a transfer posts the rest.
        """
        self._postings.begin_compute()

    def prefetch(self, layer: int, shares: Sequence[float] = (1.0,)) -> None:
        """Start sending the weights of `layer`'s replicas, unless they are in the slots or in flight.

        shares: parts to post now and at each `begin_compute` that follows.
        """
        buffer = self._buffer(layer)
        if self._content[buffer] == layer:
            return
        # A layer that just got its first replicas (`add`) takes a shared buffer from one that runs after it.
        for other in [other for other in self._fetching if self._buffer(other) == buffer]:
            for relay in self._fetching.pop(other):
                self._wait(relay.wait_sent)
        self._content[buffer] = layer
        self._fetch(layer, self._chains[layer], shares)

    def _fetch(self, layer: int, chains: list[_Chain], shares: Sequence[float]) -> None:
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
        self._moved[layer] += sum(len(chain.ranks) - 1 for chain in chains) * self._layout.nbytes
        relay = self._relay(hops, chains, self._layout.size, self._layout.dtype, shares)
        self._fetching.setdefault(layer, []).append(relay)

    def add(self, layer: int, placement: ReplicaPlacement) -> None:
        """Add late replicas to empty slots of `layer` before its first pass of the iteration, which waits for them.

        placement: differs from that of `begin_step` only where slots were empty.
        """
        assert not self._backwards[layer], "replicas are added before the first pass"
        before = {chain.expert: chain.ranks for chain in self._chains[layer]}
        chains = self._chains_of(placement)
        self._chains[layer] = chains
        if self._content[self._buffer(layer)] != layer:
            return  # nothing is sent yet; the first pass will request all
        missing = []
        for chain in chains:
            known = set(before.get(chain.expert, ())[1:])
            ranks = tuple(rank for rank in chain.ranks if rank not in known)
            if len(ranks) > 1:
                place = ranks.index(self._rank) if self._rank in ranks else None
                missing.append(_Chain(chain.expert, ranks, place, chain.slot))
        self._fetch(layer, missing, (1.0,))

    def acquire(self, layer: int, *, forward: bool) -> None:
        """Wait for the weights of `layer`'s replicas, and start sending those of the next layer with replicas in the
        forward or backward direction."""
        self._finish_sends()
        self.prefetch(layer)
        fetched = self._fetching.pop(layer, [])
        for relay in fetched:
            self._wait(relay.wait_received)
            self._leaving.append(relay)
        if fetched:
            self._format.received([leaf for leaves in self._held(layer) for leaf in leaves])
        self.begin_compute()
        self._prefetch_after(layer, forward)
        if self._fused and not forward and self.is_held(layer):
            accumulated = self._accumulator(layer)
            for slot, leaves in enumerate(self._leaves[layer]):
                for leaf, gradient in zip(leaves, self._like_parameters(accumulated[slot]), strict=True):
                    leaf.main_grad = gradient  # type: ignore[attr-defined]

    def _prefetch_after(self, layer: int, forward: bool) -> None:
        following = self._first_used(range(layer + 1, len(self.homes)) if forward else range(layer - 1, -1, -1))
        if following is not None and self._buffer(following) != self._buffer(layer):
            self.prefetch(following, self._postings.shares(begins_with_experts=True))

    def _first_used(self, layers: range) -> int | None:
        return next((layer for layer in layers if self.is_used(layer)), None)

    def is_used(self, layer: int) -> bool:
        """Whether `layer` has a replica on any rank of the group in this iteration."""
        return bool(self._chains[layer])

    def is_held(self, layer: int) -> bool:
        """Whether this rank has a replica of `layer` in this iteration."""
        return bool(self._held(layer))

    def _held(self, layer: int) -> list[list[torch.Tensor]]:
        """The parameters of this rank's replicas."""
        return [self._leaves[layer][chain.slot] for chain in self._chains[layer] if chain.slot is not None]

    def moved_bytes(self, layer: int) -> int:
        """Bytes that all ranks together have sent for `layer` in this iteration, weights and gradients."""
        return self._moved[layer]

    def _replicas(self, layer: int) -> int:
        return sum(len(chain.ranks) - 1 for chain in self._chains[layer])

    def leaves(self, layer: int) -> list[list[torch.Tensor]]:
        """[slot] -> the replica's parameters, filled by `acquire`; autograd accumulates gradients in them."""
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
        """After a backward pass through `layer`'s replicas: add up their gradients.

        With resident slots they are returned after the last micro-batch, with shared slots after each one.
        """
        if self.shared:  # memory suffices for the gradients of one layer in flight
            for other in list(self._reducing):
                self._finish_reduction(other)
        self._backwards[layer] += 1
        for chain in self._chains[layer]:
            if chain.slot is None:
                continue
            accumulated = self._accumulator(layer)
            start = 0
            for leaf in self._leaves[layer][chain.slot]:
                if leaf.grad is not None:
                    accumulated[chain.slot, start : start + leaf.numel()].add_(leaf.grad.reshape(-1))
                start += leaf.numel()
        for slot in self._leaves[layer]:
            for leaf in slot:
                leaf.grad = None
        if self.shared or self._backwards[layer] == self._micro_batches:
            self._start_reduction(layer)

    def _accumulator(self, layer: int) -> torch.Tensor:
        """Gradients of the replicas of `layer` on this rank, [slot, numbers of an expert], 0 at first."""
        accumulated = self._accumulated[layer]
        if accumulated is None:
            accumulated = torch.zeros(self.slots, self._size, dtype=self._gradient_dtype, device=self._device)
            self._accumulated[layer] = accumulated
        return accumulated

    def _like_parameters(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Views of an expert's gradients, one for each parameter."""
        pieces = flat.split([shape.numel() for shape in self._shapes])
        return [piece.view(shape) for piece, shape in zip(pieces, self._shapes, strict=True)]

    def _start_reduction(self, layer: int) -> None:
        if self._fused:
            for leaves in self._leaves[layer]:
                for leaf in leaves:
                    leaf.main_grad = None  # type: ignore[attr-defined]
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
        assert layer not in self._reducing, "a layer has two reductions in flight"
        # An exchange of tokens comes first.
        shares = 0.0, *self._postings.shares(begins_with_experts=False)
        relay = self._relay(hops, self._chains[layer], self._size, self._gradient_dtype, shares)
        self._reducing[layer] = _Reduction(relay, received)

    def end_pass(self, layer: int) -> None:
        """After a backward pass through the experts of `layer`, homes and replicas, also without replicas.

        Gradients are waited for two layers later. The layer is then complete: at the same point of the backward pass
        whatever the placements of this group and of others are.
        """
        self._passed.append(layer)
        while len(self._passed) > 2:
            self._finish(self._passed.pop(0))

    def _finish(self, layer: int) -> None:
        self._finish_reduction(layer)
        self._complete(layer)

    def _finish_reduction(self, layer: int) -> None:
        reduction = self._reducing.pop(layer, None)
        if reduction is None:
            return
        relay, received = reduction
        relay.post_rest()  # here on all ranks, also on those that receive nothing
        if received:
            self._wait(relay.wait_received)
        for home, flat in received:
            for parameter, piece in zip(self.homes[layer][home], self._like_parameters(flat), strict=True):
                self._gradient(parameter).add_(piece)
        self._leaving.append(relay)

    def take_statistics(self) -> TransferStatistics:
        """The statistics since the last call; waits are those since the step began. On a GPU the host waits for the
        last of these waits to end."""
        taken, self._statistics = self._statistics, TransferStatistics()
        if self._waits and self._device.type == "cuda":
            self._waits[-1][1].synchronize()
        taken.exposed_seconds = sum(self._clock.seconds(begin, begin, end)[1] for begin, end in self._waits)
        self._waits.clear()
        return taken

    def end_step(self) -> None:
        """After all backward passes of the iteration: wait for every gradient."""
        # Layers whose input needs no gradient come last, since their backward pass does not reach `end_pass`.
        for layer in [*self._passed, *reversed(range(len(self.homes)))]:
            self._finish(layer)
        self._passed.clear()
        for relays in self._fetching.values():  # requested for a pass that did not run
            self._leaving += relays
        self._fetching.clear()
        self._finish_sends()
        assert all(n in (0, self._micro_batches) for n in self._backwards), "a layer missed a backward pass"

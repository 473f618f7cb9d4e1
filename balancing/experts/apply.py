"""Moves expert weights to their replicas and the replicas' gradients home, under the computation of other layers.

A replica lives in a slot of a rank for one iteration at most (Pro-Prophet, section IV). Its weights come from the home
rank (`Trans`); its gradients go back there and are added to the home expert's own before anybody else sees them
(`Agg`), in the order of ranks, so that a run repeats bit for bit. Replicas are in no optimizer and no checkpoint.

Two ways to keep slots. Resident: a buffer for each layer; weights are copied once an iteration and gradients reduced
once, whatever the number of micro-batches. Shared: two buffers for all layers; while one layer computes, the next one's
weights arrive in the other. Weights are sent again for each pass, gradients reduced after each backward pass.

Every rank of the group calls the same methods in the same order, which the order of layers and micro-batches gives.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

__all__ = ["ReplicaSlots", "Traffic"]

Parameters = Sequence[torch.Tensor]  # of one expert, in a fixed order


@dataclass
class Traffic:
    """What was moved since the last look, on this rank: bytes sent, and seconds spent waiting for transfers."""

    weight_bytes: int = 0
    gradient_bytes: int = 0
    exposed_seconds: float = 0.0


@dataclass(frozen=True)
class _Copy:
    expert: int
    home: int  # rank in the group
    rank: int
    slot: int


@dataclass
class _Transfer:
    """Messages under way. `buffers` keeps what is being sent alive, `received` is (home expert, tensor), by rank."""

    works: list[dist.Work]
    buffers: list[torch.Tensor]
    received: list[tuple[int, torch.Tensor]]


class ReplicaSlots:
    """The replica slots of this rank for the MoE layers of one model chunk.

    homes      [layer][home expert] -> its parameters; all experts alike
    slots      replicas this rank can hold for a layer
    group      expert-parallel group, used for nothing else at the same time
    shared     two buffers for all layers instead of one for each
    gradient   home parameter -> the fp32 (or float64) tensor that its gradient is accumulated in
    reduced    called with a layer's number when all gradients of its replicas are in their homes
    """

    def __init__(
        self,
        homes: Sequence[Sequence[Parameters]],
        slots: int,
        group: dist.ProcessGroup,
        *,
        shared: bool,
        gradient: Callable[[torch.Tensor], torch.Tensor],
        reduced: Callable[[int], None],
    ) -> None:
        self.homes, self.slots, self.shared = homes, slots, shared
        self.traffic = Traffic()
        self._group, self._gradient, self._reduced = group, gradient, reduced
        self._rank = dist.get_rank(group)
        self._global = dist.get_process_group_ranks(group)
        self._homes_per_rank = len(homes[0])
        first = homes[0][0]
        self._shapes = [p.shape for p in first]
        self._size = sum(p.numel() for p in first)
        self._dtype, self._device = first[0].dtype, first[0].device
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
        self._copies: list[list[_Copy]] = [[] for _ in homes]
        self._content: list[int | None] = [None] * buffers
        self._fetching: dict[int, _Transfer] = {}
        self._reducing: list[tuple[int, _Transfer]] = []
        self._backwards = [0] * len(homes)
        self._micro_batches = 1

    @staticmethod
    def bytes_needed(homes: Sequence[Sequence[Parameters]], slots: int, *, shared: bool) -> int:
        """Bytes that the buffers of weights and, where they are kept, of gradients take on this rank."""
        size = sum(p.numel() for p in homes[0][0])
        weight, gradient = homes[0][0][0].element_size(), max(4, homes[0][0][0].element_size())
        layers = len(homes)
        return slots * size * (min(2, layers) * weight + gradient if shared else layers * (weight + gradient))

    def _views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        pieces = flat.split([shape.numel() for shape in self._shapes])
        return [p.view(shape).detach().requires_grad_() for p, shape in zip(pieces, self._shapes, strict=True)]

    def _buffer(self, layer: int) -> int:
        return layer % 2 if self.shared else layer

    # Trans.

    def begin_step(self, placements: Sequence[np.ndarray], micro_batches: int) -> None:
        """The weights of this iteration are final. Start with the first layer's replicas.

        placements: for each layer an int array [rank, slot] of experts, -1 where a slot is empty.
        micro_batches: backward passes that each layer will make in this iteration.
        """
        assert not self._fetching and not self._reducing, "transfers of the last iteration are not finished"
        self._copies = [self._copies_of(placement) for placement in placements]
        self._content = [None] * len(self._content)
        self._backwards = [0] * len(self.homes)
        self._micro_batches = micro_batches
        self.prefetch(0)

    def _copies_of(self, placement: np.ndarray) -> list[_Copy]:
        return sorted(
            (
                _Copy(int(expert), int(expert) // self._homes_per_rank, rank, slot)
                for rank, row in enumerate(placement)
                for slot, expert in enumerate(row)
                if expert >= 0
            ),
            key=lambda copy: (copy.expert, copy.rank),
        )

    def _post(self, messages: list[tuple[bool, torch.Tensor, int, int]]) -> list[dist.Work]:
        """Start messages: (is it sent, tensor, the other rank of the group, tag)."""
        operations = [
            dist.P2POp(dist.isend if sent else dist.irecv, tensor, self._global[other], self._group, tag)
            for sent, tensor, other, tag in messages
        ]
        return dist.batch_isend_irecv(operations) if operations else []

    def prefetch(self, layer: int) -> None:
        """Start bringing the weights of `layer`'s replicas, unless they are here or under way. Returns at once."""
        if not 0 <= layer < len(self.homes) or self._content[self._buffer(layer)] == layer:
            return
        buffer = self._buffer(layer)
        self._content[buffer] = layer
        messages, buffers = [], []
        for number, copy in enumerate(self._copies[layer]):
            tag = (layer * 2) * 10_000 + number
            if copy.home == self._rank:
                home = self.homes[layer][copy.expert % self._homes_per_rank]
                flat = torch.cat([p.detach().reshape(-1) for p in home])
                messages.append((True, flat, copy.rank, tag))
                buffers.append(flat)
                self.traffic.weight_bytes += flat.numel() * flat.element_size()
            elif copy.rank == self._rank:
                messages.append((False, self._weights[buffer].data[copy.slot], copy.home, tag))
        self._fetching[layer] = _Transfer(self._post(messages), buffers, [])

    def acquire(self, layer: int, then: int) -> None:
        """Have the weights of `layer`'s replicas in its slots, and start bringing those of layer `then`."""
        self.prefetch(layer)
        transfer = self._fetching.pop(layer, None)
        if transfer is not None:
            self._wait(transfer.works)
        if self.slots:
            self.prefetch(then)

    def is_used(self, layer: int) -> bool:
        """True if some rank of the group holds a replica of an expert of `layer` in this iteration."""
        return bool(self._copies[layer])

    def leaves(self, layer: int) -> list[list[torch.Tensor]]:
        """[slot] -> the parameters that `acquire` filled, which gather gradients."""
        return self._leaves[layer]

    def _wait(self, works: list[dist.Work]) -> None:
        # On a GPU this makes the stream wait, not the host; what it costs there shows in the trace.
        begin = time.perf_counter()
        for work in works:
            work.wait()
        self.traffic.exposed_seconds += time.perf_counter() - begin

    # Agg.

    def collect(self, layer: int) -> None:
        """A backward pass through `layer`'s replicas has ended: take their gradients, and send them home when due."""
        self._backwards[layer] += 1
        accumulated = self._accumulated[layer]
        for copy in self._copies[layer]:
            if copy.rank != self._rank:
                continue
            if accumulated is None:
                accumulated = torch.zeros(self.slots, self._size, dtype=self._gradient_dtype, device=self._device)
            start = 0
            for leaf in self._leaves[layer][copy.slot]:
                if leaf.grad is not None:
                    accumulated[copy.slot, start : start + leaf.numel()].add_(leaf.grad.reshape(-1))
                start += leaf.numel()
        for slot in self._leaves[layer]:
            for leaf in slot:
                leaf.grad = None
        self._accumulated[layer] = accumulated
        last = self._backwards[layer] == self._micro_batches
        self._finish_reductions()
        if self.shared or last:
            self._start_reduction(layer)

    def _start_reduction(self, layer: int) -> None:
        messages, buffers, received = [], [], []
        accumulated = self._accumulated[layer]
        self._accumulated[layer] = None
        for number, copy in enumerate(self._copies[layer]):
            tag = (layer * 2 + 1) * 10_000 + number
            if copy.rank == self._rank:
                assert accumulated is not None
                flat = accumulated[copy.slot]
                messages.append((True, flat, copy.home, tag))
                buffers.append(flat)
                self.traffic.gradient_bytes += flat.numel() * flat.element_size()
            elif copy.home == self._rank:
                flat = torch.empty(self._size, dtype=self._gradient_dtype, device=self._device)
                messages.append((False, flat, copy.rank, tag))
                received.append((copy.expert % self._homes_per_rank, flat))
        self._reducing.append((layer, _Transfer(self._post(messages), buffers, received)))

    def _finish_reductions(self) -> None:
        for layer, transfer in self._reducing:
            self._wait(transfer.works)
            for home, flat in transfer.received:
                pieces = flat.split([shape.numel() for shape in self._shapes])
                for parameter, piece in zip(self.homes[layer][home], pieces, strict=True):
                    self._gradient(parameter).add_(piece.view(parameter.shape))
            if self._backwards[layer] == self._micro_batches:
                self._reduced(layer)
        self._reducing.clear()

    def take_traffic(self) -> Traffic:
        """What was moved since the last call."""
        taken, self.traffic = self.traffic, Traffic()
        return taken

    def end_step(self) -> None:
        """All backward passes of the iteration have run: have every gradient at home."""
        self._finish_reductions()
        for transfer in self._fetching.values():  # fetched for a pass that did not come
            self._wait(transfer.works)
        self._fetching.clear()
        assert all(n in (0, self._micro_batches) for n in self._backwards), "a layer missed a backward pass"

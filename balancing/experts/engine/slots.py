"""Replica slots: send expert weights to replicas and return the replicas' gradients, while other layers compute.

A replica lives in a slot for at most one iteration (Pro-Prophet, arXiv 2411.10003, section IV). The home rank sends its
weights (`Trans`). The replica's gradients return to the home rank, where they are added to the home expert's gradients
before anything else reads them (`Agg`). Both are relayed from rank to rank (`balancing.experts.engine.relay`): an
expert leaves its home once, however many replicas it has, and gradients are added in a fixed order, so that runs repeat
bit for bit. Replicas are in no optimizer and no checkpoint.

Slots have two modes. Resident: each layer has its own buffer. Weights are sent once an iteration and gradients returned
once, whatever the number of micro-batches. Shared: all layers share two buffers. While one layer computes, the next
layer's weights arrive in the other buffer. Weights are sent for each pass, gradients returned after each backward pass.

Example: three layers and two micro-batches. F1 and B1 are the forward and backward pass through the experts of layer 1.
W1 below a pass: the weights of layer 1 are sent from the beginning of the pass. G1: the gradients of layer 1 are sent
from the end of the pass.

    begin  F0  F1  F2  B2  B1      B0  F0  F1  F2  B2  B1      B0
    W0     W1  W2                                  G2  G1      G0   resident
    W0     W1  W2      G2  W0, G1  G0      W2      G2  W0, G1  G0   shared

With shared slots, layers 0 and 2 have the same buffer. The backward pass still finds layers 2 and 1 in the buffers, and
layer 0 is sent again. If forward passes alternate layer by layer with backward passes of another micro-batch
(`alternating`), one pass is in the first half of the layers while the other is in the second half. Each half then has
two buffers.

A pass waits for the weights of its layer. Gradients are waited for two layers later, or when the iteration ends.
Transfers run while the rank computes, in steps that are posted when the links are free (`balancing.experts.engine.
posting`). All ranks of the group must call the same methods in the same order; the order of layers and micro-batches
ensures this.
"""

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from balancing.clock import CpuClock, CudaClock, DeviceClock
from balancing.experts.engine.chains import Chain, Numbers, chains_of, hops_of
from balancing.experts.engine.posting import Postings
from balancing.experts.engine.relay import Hop, Relay, number_of_pieces
from balancing.experts.engine.weights import GradientLayout, Parameters, WeightFormat, WeightLayout, aligned
from balancing.experts.placement import ReplicaPlacement

__all__ = ["HomeExperts", "ReplicaSlots", "TransferStatistics"]


def _nothing(layer: int) -> None:
    """Do nothing."""


def _add(pairs: Iterable[tuple[torch.Tensor | None, torch.Tensor | None]]) -> None:
    """Add the second tensor of each pair to the first, if there are both, in one operation."""
    present = [pair for pair in pairs if pair[0] is not None and pair[1] is not None]
    if present:
        torch._foreach_add_(*zip(*present, strict=True))


def _dtype_of_gradients(parameters: Parameters) -> torch.dtype:
    """The type in which gradients of `parameters` are added up: float32, or float64 if there is one."""
    return torch.float64 if any(p.dtype is torch.float64 for p in parameters) else torch.float32


@dataclass(frozen=True)
class HomeExperts:
    """The experts that are at home on this rank, in the MoE layers of one model chunk.

    parameters: [layer][home expert] -> its parameters; all experts of a layer have the same shapes.
    gradient: home parameter that trains -> the fp32 (or float64) tensor that accumulates its gradient.
    trained: [layer][expert of the group][parameter] -> whether it trains. Replicas of other parameters have no
        gradient and return none. The same on all ranks; None: all parameters train.
    fused: whether the backward pass of a replica's weight adds to the weight's attribute `main_grad`, of the type of
        `gradient`, instead of `grad` (fused gradient accumulation).
    format: how parameters are stored.
    final: called with a layer's number before the weights of its home experts are read. It makes them final.
    complete: called with a layer's number when the gradients of its replicas have been added to those of the home
        experts, in the order of `end_pass`. That is after some backward passes of the layer, always after the last one.
    first_layer: number of the first layer in message tags. Layers that share a process group need different numbers.
    """

    parameters: Sequence[Sequence[Parameters]]
    gradient: Callable[[torch.Tensor], torch.Tensor]
    trained: Sequence[Sequence[Sequence[bool]]] | None = None
    fused: bool = False
    format: WeightFormat = field(default_factory=WeightFormat)
    final: Callable[[int], None] = _nothing
    complete: Callable[[int], None] = _nothing
    first_layer: int = 0


@dataclass
class TransferStatistics:
    """Transfers of this rank since the last `take_statistics`.

    weight_bytes, gradient_bytes: bytes sent.
    exposed_seconds: seconds that this rank, on a GPU its compute stream, waited for transfers.
    """

    weight_bytes: int = 0
    gradient_bytes: int = 0
    exposed_seconds: float = 0.0


class _Reduction(NamedTuple):
    """A layer's gradients in flight.

    relay: the transfer.
    received: (home expert, sum of its replicas' gradients), for this rank's home experts with replicas.
    """

    relay: Relay
    received: list[tuple[int, torch.Tensor]]


@dataclass
class _Layer:
    """The slots of one layer and their state in an iteration.

    homes: [home expert] -> its parameters.
    layout, gradient_layout: of an expert's weights and gradients in flat tensors.
    gradient_dtype: of gradients that are added up and sent.
    trained: [expert of the group][parameter] -> whether it trains.
    buffer: number of the buffer that holds the layer's slots.
    weights: [slot, element], the flat weights of the expert in each slot; memory of the buffer.
    leaves: [slot] -> the replica's parameters, in the memory of `weights`.
    placement: the placement of the iteration.
    chains: chains of the layer's experts with replicas.
    full: slots with a replica of this rank.
    fetching: weights in flight.
    accumulated: [slot, element], gradients of this rank's replicas; None before the first gradients.
    parts: [slot] -> views of `accumulated`, one for each parameter, None if it does not train.
    reduction: gradients in flight.
    backwards: number of backward passes so far in the iteration.
    moved_bytes: bytes sent by all ranks together, weights and gradients.
    """

    homes: Sequence[Parameters]
    layout: WeightLayout
    gradient_layout: GradientLayout
    gradient_dtype: torch.dtype
    trained: Sequence[Sequence[bool]]
    buffer: int
    weights: torch.Tensor
    leaves: list[list[torch.Tensor]]
    placement: ReplicaPlacement | None = None
    chains: list[Chain] = field(default_factory=list)
    full: list[int] = field(default_factory=list)
    fetching: list[Relay] = field(default_factory=list)
    accumulated: torch.Tensor | None = None
    parts: list[list[torch.Tensor | None]] = field(default_factory=list)
    reduction: _Reduction | None = None
    backwards: int = 0
    moved_bytes: int = 0

    def begin_step(self, placement: ReplicaPlacement, rank: int) -> None:
        """Begin an iteration on `rank` with replicas as in `placement`."""
        self.backwards = self.moved_bytes = 0
        if placement is not self.placement:
            self.placement = placement
            self.place(chains_of(placement, rank))

    def place(self, chains: list[Chain]) -> None:
        """Use the replicas of `chains` from now on."""
        self.chains = chains
        self.full = sorted(chain.slot for chain in chains if chain.slot is not None)
        for chain in chains:
            if chain.slot is not None:
                for leaf, trains in zip(self.leaves[chain.slot], self.trained[chain.expert], strict=True):
                    if leaf.requires_grad != trains:
                        leaf.requires_grad_(trains)

    @property
    def gradient_chains(self) -> list[Chain]:
        """The chains of experts of which a parameter trains."""
        return [chain for chain in self.chains if any(self.trained[chain.expert])]

    @property
    def gradient_bytes(self) -> int:
        """Bytes of the gradients of one expert."""
        return self.gradient_layout.size * self.gradient_dtype.itemsize


class _Buffers(NamedTuple):
    """The number of buffers for the slots of `layers` layers, and the buffer of each layer."""

    layers: int
    shared: bool
    alternating: bool

    @property
    def number(self) -> int:
        return min(4 if self.alternating else 2, self.layers) if self.shared else self.layers

    def sizes(self, layouts: Sequence[WeightLayout]) -> list[int]:
        """Bytes of a slot in each buffer. layouts: of the layers."""
        sizes = [0] * self.number
        alike = len({layout.dtype for layout in layouts}) == 1
        for layer, layout in enumerate(layouts):
            sizes[self.of(layer)] = max(sizes[self.of(layer)], layout.nbytes if alike else aligned(layout.nbytes))
        return sizes

    def of(self, layer: int) -> int:
        if self.number == self.layers:
            return layer
        return layer % 2 + (2 if self.alternating and layer >= self.layers / 2 else 0)


def _trained(expert: Parameters, experts: int, trained: Sequence[Sequence[bool]] | None) -> Sequence[Sequence[bool]]:
    """[expert of the group][parameter] -> whether it trains. trained: the same, or None if all do."""
    return [(True,) * len(expert)] * experts if trained is None else trained


def _places(trained: Sequence[Sequence[bool]]) -> set[int]:
    """Places of the parameters that some expert trains."""
    return {place for expert in trained for place, trains in enumerate(expert) if trains}


class ReplicaSlots:
    """The replica slots of this rank for the MoE layers of one model chunk.

    homes: the experts of this rank in these layers.
    slots: largest number of replicas of a layer on this rank.
    process_group: expert-parallel group, used for nothing else at the same time.
    shared: whether all layers share two buffers, instead of one buffer for each layer.
    alternating: whether a forward and a backward pass alternate. Shared slots then have four buffers.
    expert_share: fraction of a layer's compute that is expert compute, to send each transfer in two parts
        (`balancing.experts.engine.posting`). None sends transfers whole.
    """

    def __init__(
        self,
        homes: HomeExperts,
        slots: int,
        process_group: dist.ProcessGroup,
        *,
        shared: bool,
        alternating: bool = False,
        expert_share: float | None = None,
    ) -> None:
        self.homes, self.slots, self.shared = homes, slots, shared
        self.memory_bytes = self.bytes_needed(
            homes.parameters, slots, shared=shared, alternating=alternating, format=homes.format, trained=homes.trained
        )
        self._rank = dist.get_rank(process_group)
        self._homes_per_rank = len(homes.parameters[0])
        self._experts = self._homes_per_rank * dist.get_world_size(process_group)
        self._device = homes.parameters[0][0][0].device
        buffers = _Buffers(len(homes.parameters), shared, alternating)
        layouts = [WeightLayout(experts[0], homes.format) for experts in homes.parameters]
        self._weights = [
            torch.zeros(slots, size, dtype=torch.uint8, device=self._device) for size in buffers.sizes(layouts)
        ]
        self._layers = [self._make_layer(number, layout, buffers.of(number)) for number, layout in enumerate(layouts)]
        self._content: list[int | None] = [None] * buffers.number  # the layer that each buffer holds or receives
        # One stream for all transfers: torch has only 32, and NCCL's communicators use some of them.
        stream = torch.cuda.Stream(self._device) if self._weights[0].is_cuda else None
        # All ranks must have the same value of this variable.
        one_queue = stream is not None and os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1"
        self._postings = Postings(process_group, stream, turn_by_turn=one_queue, expert_share=expert_share)
        self._leaving: list[Relay] = []  # transfers that are received here but may still be sending
        self._passed: list[int] = []  # layers after their backward pass, with gradients that may be in flight
        self._micro_batches = 1
        self._in_progress = False  # whether an iteration has begun and not ended
        self.is_abandoned = False  # whether the last iteration has failed, and its transfers may be in flight
        self.started = 0  # transfers of this iteration
        self._statistics = TransferStatistics()
        self._clock: DeviceClock = CudaClock() if self._device.type == "cuda" else CpuClock()
        self._waits: list[tuple[Any, Any]] = []  # clock marks at the begin and end of each wait

    def _make_layer(self, number: int, layout: WeightLayout, buffer: int) -> _Layer:
        homes = self.homes.parameters[number]
        trained = _trained(homes[0], self._experts, self.homes.trained[number] if self.homes.trained else None)
        places = _places(trained)
        dtype = _dtype_of_gradients(homes[0])
        if self.homes.fused and (mine := [p for expert in homes for p in expert if p.requires_grad]):
            dtype = self.homes.gradient(mine[0]).dtype
        # Autograd leaves that share the buffers' memory but not their version counters. A shared buffer is overwritten
        # between a forward pass and its backward pass, but has the same weights again when the backward pass runs.
        weights = self._weights[buffer].data[:, : layout.nbytes].view(layout.dtype)
        leaves = [layout.replicas(homes[0], flat) for flat in weights]
        for slot in leaves:
            for place, leaf in enumerate(slot):
                if place not in places:
                    leaf.requires_grad_(False)
        gradient_layout = GradientLayout(homes[0], places)
        return _Layer(homes, layout, gradient_layout, dtype, trained, buffer, weights, leaves)

    @staticmethod
    def bytes_needed(
        homes: Sequence[Sequence[Parameters]],
        slots: int,
        *,
        shared: bool,
        alternating: bool = False,
        format: WeightFormat | None = None,
        copies: int = 0,
        trained: Sequence[Sequence[Sequence[bool]]] | None = None,
    ) -> int:
        """Bytes of memory that replicas and their gradients take on this rank.

        homes: [layer][home expert] -> its parameters.
        slots, shared, alternating: as in `ReplicaSlots`.
        format: how parameters are stored.
        copies: bytes per parameter of a replica that the layers keep outside the slots, such as a quantized weight.
        trained: as in `HomeExperts`.
        """
        layouts = [WeightLayout(experts[0], format or WeightFormat()) for experts in homes]
        gradients = []
        for layer, experts in enumerate(homes):
            places = _places(_trained(experts[0], 1, trained[layer] if trained else None))
            size = GradientLayout(experts[0], places).size
            gradients.append(size * max(4, _dtype_of_gradients(experts[0]).itemsize))
        # Shared slots have two gradient buffers, in alternating mode too: one is filled while the other is sent.
        held = 2 * max(gradients) if shared and len(homes) > 1 else sum(gradients)
        copied = copies * sum(p.numel() for experts in homes for p in experts[0])
        return slots * (sum(_Buffers(len(homes), shared, alternating).sizes(layouts)) + held + copied)

    # Trans.

    def begin_step(self, placements: Sequence[ReplicaPlacement], micro_batches: int) -> None:
        """Begin an iteration. Starts sending the weights of the first layer with replicas.

        The weights of all layers must be final, or made final by `HomeExperts.final`.

        placements: one for each layer, with homes in contiguous blocks.
        micro_batches: number of backward passes of each layer in this iteration.
        """
        in_flight = any(layer.fetching or layer.reduction for layer in self._layers)
        assert not (in_flight or self._leaving or self._passed), "transfers of the last iteration are not finished"
        self._in_progress, self.started = True, 0
        self._waits.clear()
        self._content = [None] * len(self._content)
        self._micro_batches = micro_batches
        for layer, placement in zip(self._layers, placements, strict=True):
            layer.begin_step(placement, self._rank)
        first = self._first_used(range(len(self._layers)))
        if first is not None:
            self.prefetch(first)

    @property
    def turn_by_turn(self) -> bool:
        """Whether the steps of transfers are posted one at a time, by `advance`."""
        return self._postings.turn_by_turn

    def advance(self) -> None:
        """Post the next step of the oldest transfer, if steps are posted one at a time.

        Call it on all ranks at the same points, with compute in between. Waiting for a transfer posts its other steps.
        """
        self._postings.advance()

    def begin_compute(self) -> None:
        """Post the next part of each transfer, if transfers are sent in parts.

        Call it on all ranks at the same points, when a stretch of compute begins. Waiting for a transfer posts its
        other parts.
        """
        self._postings.begin_compute()

    def prefetch(self, number: int, shares: Sequence[float] = (1.0,)) -> None:
        """Start sending the weights of the replicas of layer `number`, unless they are in the slots or in flight.

        shares: fractions of the transfer to post now and at each following `begin_compute`.
        """
        layer = self._layers[number]
        if self._content[layer.buffer] == number:
            return
        # Another layer's weights may still be on their way into or out of the shared buffer.
        for other in self._layers:
            if other.buffer == layer.buffer:
                for relay in other.fetching:
                    self._wait(relay.wait_sent)
                other.fetching.clear()
        self._content[layer.buffer] = number
        self._fetch(number, layer.chains, shares)

    def _fetch(self, number: int, chains: list[Chain], shares: Sequence[float]) -> None:
        layer = self._layers[number]
        self.homes.final(number)

        def tensors(chain: Chain) -> tuple[torch.Tensor, None]:
            at_home = chain.slot is None
            return self._flat_home(layer, chain.expert) if at_home else layer.weights[chain.slot], None

        hops = hops_of(chains, self._numbers(number, homeward=False), tensors)
        self._statistics.weight_bytes += sum(hop.sent_bytes for hop in hops)
        layer.moved_bytes += sum(chain.replicas for chain in chains) * layer.layout.nbytes
        layer.fetching.append(self._relay(hops, chains, layer.layout.size, layer.layout.dtype, shares))

    def _flat_home(self, layer: _Layer, expert: int) -> torch.Tensor:
        return layer.layout.flat(layer.homes[expert % self._homes_per_rank])

    def _numbers(self, number: int, *, homeward: bool) -> Numbers:
        return Numbers(self.homes.first_layer + number, homeward, self._experts)

    def _relay(
        self, hops: list[Hop], chains: list[Chain], size: int, dtype: torch.dtype, shares: Sequence[float]
    ) -> Relay:
        """Start this rank's hops of `chains`. The chains are the same on all ranks.

        size, dtype: elements of one expert's weights or gradients, and their type.
        shares: as in `Postings.start`.
        """
        turns = 0
        self.started += 1
        if chains:
            turns = max(chain.replicas for chain in chains) + number_of_pieces(size, dtype) - 1
        return self._postings.start(hops, turns, shares)

    def acquire(self, number: int, *, forward: bool) -> None:
        """Wait for the weights of the replicas of layer `number`, and start sending those of the next layer with
        replicas in the forward or backward direction."""
        layer = self._layers[number]
        self._finish_sends()
        self.prefetch(number)
        for relay in layer.fetching:
            self._wait(relay.wait_received)
            self._leaving.append(relay)
        if layer.fetching:
            self.homes.format.received([leaf for slot in layer.full for leaf in layer.leaves[slot]])
            layer.fetching.clear()
        self.begin_compute()
        self._prefetch_after(number, forward)
        if self.homes.fused and not forward and layer.full:
            self._accumulator(number)
            for leaves, parts in zip(layer.leaves, layer.parts, strict=True):
                for leaf, gradient in zip(leaves, parts, strict=True):
                    leaf.main_grad = gradient  # type: ignore[attr-defined]

    def _prefetch_after(self, number: int, forward: bool) -> None:
        following = self._first_used(range(number + 1, len(self._layers)) if forward else range(number - 1, -1, -1))
        if following is not None and self._layers[following].buffer != self._layers[number].buffer:
            self.prefetch(following, self._postings.shares(begins_with_experts=True))

    def _first_used(self, numbers: range) -> int | None:
        return next((number for number in numbers if self.is_used(number)), None)

    def is_used(self, number: int) -> bool:
        """Whether layer `number` has a replica on any rank of the group in this iteration."""
        return bool(self._layers[number].chains)

    def trains(self, number: int) -> bool:
        """Whether any expert of layer `number` on any rank of the group has parameters that train."""
        return any(map(any, self._layers[number].trained))

    def held(self, number: int) -> int:
        """Number of slots of layer `number` up to the last with a replica of this rank in this iteration."""
        full = self._layers[number].full
        return full[-1] + 1 if full else 0

    def moved_bytes(self, number: int) -> int:
        """Bytes that all ranks together have sent for layer `number` in this iteration, weights and gradients."""
        return self._layers[number].moved_bytes

    def leaves(self, number: int) -> list[list[torch.Tensor]]:
        """[slot] -> the replica's parameters, filled by `acquire`. Autograd accumulates gradients in them."""
        return self._layers[number].leaves

    def _finish_sends(self) -> None:
        for relay in self._leaving:
            self._wait(relay.wait_sent)
        self._leaving.clear()

    def _wait(self, wait: Callable[[], None]) -> None:
        begin = self._clock.mark()
        wait()
        self._waits.append((begin, self._clock.mark()))

    # Agg.

    def accumulate_gradients(self, number: int) -> None:
        """Add the gradients of a backward pass through the replicas of layer `number` to those of earlier passes.

        With resident slots, the gradients are returned after the last micro-batch, with shared slots after each one.
        """
        if self.shared:  # shared slots have memory for the gradients of only one layer in flight
            for other in range(len(self._layers)):
                self._finish_reduction(other)
        layer = self._layers[number]
        layer.backwards += 1
        if layer.full:
            self._accumulator(number)
            _add(
                (part, leaf.grad)
                for slot in layer.full
                for part, leaf in zip(layer.parts[slot], layer.leaves[slot], strict=True)
            )
        for leaves in layer.leaves:
            for leaf in leaves:
                leaf.grad = None
        if self.shared or layer.backwards == self._micro_batches:
            self._start_reduction(number)

    def _accumulator(self, number: int) -> torch.Tensor:
        """Gradients of the replicas of layer `number` on this rank, [slot, element], zeros at first."""
        layer = self._layers[number]
        if layer.accumulated is None:
            size, dtype = layer.gradient_layout.size, layer.gradient_dtype
            layer.accumulated = torch.zeros(self.slots, size, dtype=dtype, device=self._device)
            layer.parts = [layer.gradient_layout.views(flat) for flat in layer.accumulated.unbind()]
        return layer.accumulated

    def _start_reduction(self, number: int) -> None:
        layer = self._layers[number]
        assert layer.reduction is None, "a layer has two reductions in flight"
        if self.homes.fused:
            for leaves in layer.leaves:
                for leaf in leaves:
                    leaf.main_grad = None  # type: ignore[attr-defined]
        accumulated, layer.accumulated, layer.parts = layer.accumulated, None, []
        chains = layer.gradient_chains
        if not chains:  # on all ranks: no expert with a replica trains
            return
        received: list[tuple[int, torch.Tensor]] = []

        def empty() -> torch.Tensor:
            return torch.empty(layer.gradient_layout.size, dtype=layer.gradient_dtype, device=self._device)

        def tensors(chain: Chain) -> tuple[torch.Tensor, torch.Tensor | None]:
            if chain.slot is None:
                total = empty()
                received.append((chain.expert % self._homes_per_rank, total))
                return total, None
            assert accumulated is not None
            gradient = accumulated[chain.slot]
            return (gradient, None) if chain.ranks[-1] == self._rank else (empty(), gradient)

        hops = hops_of(chains, self._numbers(number, homeward=True), tensors)
        self._statistics.gradient_bytes += sum(hop.sent_bytes for hop in hops)
        layer.moved_bytes += sum(chain.replicas for chain in chains) * layer.gradient_bytes
        shares = self._gradient_shares(number)
        relay = self._relay(hops, chains, layer.gradient_layout.size, layer.gradient_dtype, shares)
        layer.reduction = _Reduction(relay, received)

    def _gradient_shares(self, number: int) -> Sequence[float]:
        """Fractions of the gradients of layer `number` to post now and at each following `begin_compute`."""
        if not number:  # after the first layer no experts follow that could hide a part, so all is sent at once
            return (1.0,)
        return 0.0, *self._postings.shares(begins_with_experts=False)  # the all-to-all of tokens comes first

    def end_pass(self, number: int) -> None:
        """Call this after each backward pass through the experts of layer `number`, even if it has no replicas.

        It waits for the gradients of the layer before the previous one and calls `HomeExperts.complete` for that layer.
        Therefore a layer is complete at the same point of the backward pass for all placements, in all groups. The last
        two layers are complete at the end of the iteration.
        """
        if number in self._passed:  # from the micro-batch before, whose gradients need no wait any more
            self._passed.remove(number)
        self._passed.append(number)
        while len(self._passed) > 2:
            self._finish(self._passed.pop(0))

    def _finish(self, number: int) -> None:
        self._finish_reduction(number)
        self.homes.complete(number)

    def _finish_reduction(self, number: int) -> None:
        layer = self._layers[number]
        if layer.reduction is None:
            return
        (relay, received), layer.reduction = layer.reduction, None
        relay.post_rest()  # also on ranks that receive nothing, since all ranks post at the same point
        if received:
            self._wait(relay.wait_received)
        first = self._rank * self._homes_per_rank
        _add(
            (self.homes.gradient(parameter), part)
            for home, flat in received
            for parameter, part, trains in zip(
                layer.homes[home], layer.gradient_layout.views(flat), layer.trained[first + home], strict=True
            )
            if trains
        )
        self._leaving.append(relay)

    def take_statistics(self) -> TransferStatistics:
        """The statistics since the last call. Exposed seconds count from the later of the last call and the last
        `begin_step`. On a GPU the host blocks until the compute stream has passed the last wait."""
        taken, self._statistics = self._statistics, TransferStatistics()
        if self._waits and self._device.type == "cuda":
            self._waits[-1][1].synchronize()
        taken.exposed_seconds = sum(self._clock.seconds(begin, begin, end)[1] for begin, end in self._waits)
        self._waits.clear()
        return taken

    def end_step(self) -> None:
        """End the iteration, after all its backward passes: wait for all gradients."""
        # Layers whose input needs no gradient come last: no backward pass calls `end_pass` for them.
        for number in [*self._passed, *reversed(range(len(self._layers)))]:
            self._finish(number)
        self._passed.clear()
        for layer in self._layers:  # weights sent for a pass that did not run
            self._leaving += layer.fetching
            layer.fetching.clear()
        self._finish_sends()
        self._in_progress = False
        self._check_passes()

    def _check_passes(self) -> None:
        assert all(layer.backwards in (0, self._micro_batches) for layer in self._layers), (
            "a layer missed a backward pass"
        )

    def abandon(self) -> None:
        """The iteration has failed, if one is in progress: drop its gradients. This does not communicate. Transfers
        stay in flight until `end_abandoned`."""
        if not self._in_progress:
            return
        self._in_progress, self.is_abandoned = False, True
        for layer in self._layers:
            self._leaving += layer.fetching
            if layer.reduction is not None:
                self._leaving.append(layer.reduction.relay)
            layer.fetching.clear()
            layer.reduction, layer.accumulated, layer.parts = None, None, []
            for leaves in layer.leaves:
                for leaf in leaves:
                    leaf.grad = None
                    if self.homes.fused:
                        leaf.main_grad = None  # type: ignore[attr-defined]
        self._passed.clear()

    def end_abandoned(self) -> None:
        """Wait for the transfers of an iteration that has failed, if there are any. All ranks of the group call it
        together, after they have failed at the same place."""
        self._finish_sends()
        self.is_abandoned = False

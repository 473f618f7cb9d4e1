"""Megatron-LM's MoE layer with replicas of hot experts (`--balance-experts`).

Routing does not change: the router, its losses and its expert bias see logical experts. Between router and dispatcher,
the logical routing map becomes a physical one, [tokens, ranks x (homes + slots)], so Megatron's dispatchers work
unmodified. Home experts remain Megatron's parameters; replicas are leaves of autograd that
`balancing.experts.engine.slots` fills and empties, so that they are in no optimizer, checkpoint or gradient norm.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

from balancing.experts.engine.late_slots import LateChains, late_chains
from balancing.experts.late import LATE_GOAL
from balancing.experts.placement import ReplicaPlacement, contiguous_homes
from balancing.experts.split.placed_split import SplitTables, kernels_split, place_all
from balancing.experts.split.split import RankSplit
from megatron.balanced.cpu.device import is_cpu
from megatron.balanced.experts.known_counts import known_counts, takes_known_counts
from megatron.balanced.experts.replicated import later, on_backward
from megatron.balanced.shared.recompute import Replays
from megatron.balanced.shared.tail import layer_index

__all__ = ["BalancedMoELayer", "place_layers"]

_LATE_PERMILLE = round(1000 * LATE_GOAL)


@dataclass(slots=True)
class _Share:
    """The split of one micro-batch, as one rank needs it.

    counts: int64 tensor, flat: what each rank sends to each expert, in the order of ranks. If there is nothing to
        split, they are None until Megatron-LM's dispatcher has gathered them.
    expert: int64 [physical], the logical expert of each physical one; None without replicas.
    interval: first and last, int64 [physical], or None without replicas. A physical expert serves those tokens of its
        logical expert on this rank, numbered from 1, for which first < number <= last.
    late: its late copies, if it has some.
    """

    counts: torch.Tensor | None = None
    expert: torch.Tensor | None = None
    interval: tuple[torch.Tensor, torch.Tensor] | None = None
    late: LateChains | None = None


def place_layers(tables: dict["BalancedMoELayer", SplitTables]) -> None:
    """Split later micro-batches of each layer over a new placement, with one copy to the device for all layers."""
    device = next(iter(tables)).device if tables else None
    for layer, placed in zip(tables, place_all(list(tables.values()), device), strict=True):
        layer._placed = placed


class BalancedMoELayer(MoELayer):
    """An MoE layer that dispatches to physical experts while there are replicas, and is Megatron's otherwise.

    `megatron.balanced.experts.exchange` makes one of a layer of Megatron-LM, by changing its class.
    """

    def prepare(self, slots: int, late_slots: int) -> None:
        """Add the attributes that Megatron's layer does not have.

        slots: number of replicas that a rank can hold, without late copies.
        late_slots: number of late copies that it can hold.
        """
        self.slots, self.late_slots, self.late_least = slots, late_slots, 0
        self.frozen = False  # runs forward only, without gradients
        self.trained_share = 1.0  # of the parameters of the group's experts
        width = self.num_local_experts + slots + late_slots
        config = copy.copy(self.config)
        config.num_moe_experts = self.ep_group.size() * width
        first = self.ep_group.rank() * width
        self._logical = self.token_dispatcher
        self._physical = type(self._logical)(
            width, list(range(first, first + width)), config=config, pg_collection=_groups_of(self._logical)
        )
        if self._logical.shared_experts is not None:
            self._physical.set_shared_experts(self._logical.shared_experts)
        # In two cases the physical dispatcher runs even if all slots are empty. NCCL EP is started once in a process,
        # for one number of experts. With a token budget, Megatron-LM asks the layer's dispatcher after a step whether
        # the budget was exceeded; if a CUDA graph ran the step, that must be the dispatcher that the graph ran.
        self._fixed_experts = self.config.moe_token_dispatcher_type == "flex" and (
            self.config.moe_flex_dispatcher_backend == "ncclep"
            or self.config.moe_expert_rank_capacity_factor is not None
        )
        if self._fixed_experts:
            self._physical.dispatch_postprocess = self._hides_empty_slots(self._physical.dispatch_postprocess)
        self._before_passes = dict(vars(self._physical))
        # Megatron-LM's dispatcher gathers counts of what each rank sends, unless padding comes in between.
        self._gathers_counts = (
            takes_known_counts()
            and isinstance(self._logical, MoEAlltoAllTokenDispatcher)
            and not self.config.moe_router_padding_for_quantization
            and self._logical.tp_ep_group.size() > 1
        )
        # One entry a micro-batch: NumPy arrays on a CPU; tensors on a GPU, so that the host need not wait.
        self.loads: list[Any] = []  # [source_rank, expert]
        self.served: list[Any] = []  # [rank], tokens after the split; none without replicas
        self.routed: Callable[[Any], None] | None = None  # called with each load, before it is added to `loads`
        self._splits: Replays[_Share] = Replays()
        # The split is computed where the tokens are, so that the host does not wait for counts. None: in NumPy.
        self.device: torch.device | None = None if is_cpu() else torch.device("cuda", torch.cuda.current_device())
        self._in_use: _Share | None = None  # of the pass in progress
        self.set_topology(0, 0)

    @property
    def active(self) -> bool:
        """Whether training passes use replicas. Otherwise the layer computes as Megatron-LM's own does."""
        return self.experts.active

    @active.setter
    def active(self, active: bool) -> None:
        self.experts.active = active
        if not active:
            self.token_dispatcher = self._logical

    @property
    def index(self) -> int:
        """Number of the layer in the model, from 0, as `layer_index` counts."""
        return layer_index(self)

    @property
    def placement(self) -> ReplicaPlacement:
        """The placement over which micro-batches are split."""
        return self._placed.placement

    def set_topology(self, ranks_per_node: int, nics_per_node: int) -> None:
        """Set the nodes and NICs of the expert-parallel group as `ReplicaPlacement` takes them; drops all replicas."""
        ranks = self.ep_group.size()
        home, slots = contiguous_homes(self.config.num_moe_experts, ranks), np.full((ranks, self.slots), -1)
        nodes = {"ranks_per_node": ranks_per_node, "nics_per_node": nics_per_node}
        self.without_replicas = self.tables(ReplicaPlacement(home, slots, **nodes))
        place_layers({self: self.without_replicas})
        kernels_split(self.placement, self.device)  # compiles them now, and not in a step

    def tables(self, placement: ReplicaPlacement) -> SplitTables:
        """The tables for splits over `placement`, as `place_layers` takes them."""
        if not self.late_slots:
            return SplitTables(placement, self.device)
        return SplitTables(placement.with_late(np.full((placement.num_ranks, self.late_slots), -1)), self.device)

    def forget_passes(self) -> None:
        """Forget the micro-batches of the last schedule, which may have failed before they were recomputed."""
        self.loads.clear()
        self.served.clear()
        self._splits.clear()

    def forget_slots(self) -> None:
        """Keep nothing of slots that are freed, nor of the passes that used them: a dispatcher keeps its last one."""
        self.forget_passes()
        self.routed = self._in_use = None
        self.experts.slots = self.experts.late_slots = self.experts.late = None
        self.experts.forget_slots()
        vars(self._physical).clear()
        vars(self._physical).update(self._before_passes)

    def place(self, placement: ReplicaPlacement) -> None:
        """Split later micro-batches over `placement`."""
        place_layers({self: self.tables(placement)})

    def preprocess(self, hidden_states: torch.Tensor, probs: torch.Tensor, routing_map: torch.Tensor) -> Any:
        dispatched, *rest = self._preprocess(hidden_states, probs, routing_map)
        if self.training and self.active:
            # The token all-to-all comes next; in a backward pass it has just ended.
            dispatched = on_backward(dispatched, later(self, "_begin_compute"))
        return dispatched, *rest

    def _begin_compute(self) -> None:
        if self.experts.slots is not None:
            self.experts.slots.begin_compute()

    def _preprocess(self, hidden_states: torch.Tensor, probs: torch.Tensor, routing_map: torch.Tensor) -> Any:
        if not (self.training and self.active):
            self.token_dispatcher, self._in_use = self._logical, None
            if self._fixed_experts:
                probs, routing_map = self._with_empty_slots(probs, routing_map)
            return super().preprocess(hidden_states, probs, routing_map)
        if self.frozen:  # a pass without gradients that is not recomputed later
            share = self._share(routing_map)
        else:
            share, again = self._splits.decide(lambda: self._share(routing_map))
            if self.experts.late_slots is not None:
                self.experts.begin_late(share.late, again=again)
        if share.interval is not None:
            self._in_use, self.token_dispatcher, (first, last) = share, self._physical, share.interval
            expert = share.expert
            assert expert is not None
            routing_map, probs = self._placed.route(routing_map, probs, expert, first, last)
            if self.config.moe_router_padding_for_quantization:
                # The dispatcher changes the map in place: it pads the tokens of each expert to a multiple.
                routing_map = routing_map.clone()
        elif self._fixed_experts:
            self._in_use = share
            probs, routing_map = self._with_empty_slots(probs, routing_map)
        elif self.token_dispatcher is not self._logical:
            self.token_dispatcher = self._logical
        if not self._gathers_counts:
            return super().preprocess(hidden_states, probs, routing_map)
        is_counted = share.counts is not None
        with known_counts(share):
            dispatched = super().preprocess(hidden_states, probs, routing_map)
        if not is_counted:
            self._add_load(share.counts)
        return dispatched

    def _with_empty_slots(self, probs: torch.Tensor, routing_map: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Widen both for the physical dispatcher with empty slots: [token, expert] -> [token, physical]."""
        self.token_dispatcher = self._physical

        def widen(by_expert: torch.Tensor) -> torch.Tensor:
            by_rank = by_expert.view(len(by_expert), -1, self.num_local_experts)
            return torch.nn.functional.pad(by_rank, (0, self.slots + self.late_slots)).flatten(1)

        return widen(probs), widen(routing_map)

    def _hides_empty_slots(self, dispatch_postprocess: Callable) -> Callable:
        """The dispatcher's method. While there are no replicas, its counts of tokens are those of homes only."""

        def without_empty_slots(*args: Any) -> tuple[Any, Any, Any]:
            hidden, counts, probs = dispatch_postprocess(*args)
            if self._in_use is None or self._in_use.interval is None:
                counts = counts[: self.num_local_experts]
            return hidden, counts, probs

        return without_empty_slots

    def _share(self, routing_map: torch.Tensor) -> _Share:
        """Gather the load of all ranks and split it. routing_map: bool [token, expert].

        Without replicas there is nothing to split, and the counts that Megatron-LM gathers are enough.
        """
        adds_late = self.late_slots > 0 and not self.frozen
        if self._gathers_counts and not self.placement.replicas and not adds_late:
            return _Share()
        local = routing_map.sum(dim=0, dtype=torch.int64)
        gathered = gather_from_sequence_parallel_region(local, group=self._logical.tp_ep_group)
        counts = self._add_load(gathered)
        load = self.loads[-1]
        if not (self.placement.replicas or adds_late):
            return _Share(gathered)
        rank = self.ep_group.rank()
        sources = range(rank, rank + 1) if self._logical.tp_size == 1 else None
        split = self._placed.split(load, sources, _LATE_PERMILLE if adds_late else None, self.late_least)
        late = None
        if adds_late:  # on a GPU the host waits for them, as Megatron-LM's dispatcher soon would
            late = split.late if isinstance(split.late, np.ndarray) else split.late.cpu().numpy()
            if not self.placement.replicas and late.max() < 0:
                self.served.append(split.tokens)
                return _Share(gathered)
            late = late_chains(self.placement.home, late, rank)
        share = self._divided(counts, split)
        share.late = late
        return share

    def _add_load(self, gathered: torch.Tensor) -> Any:
        """Add a micro-batch to `loads`. gathered: int64 tensor, flat, what each rank sends to each expert. Returns it,
        with several tensor-parallel ranks as int64 [source_rank, tensor_rank, expert]."""
        dispatcher = self._logical
        counts = gathered.numpy() if self.device is None else gathered
        if dispatcher.tp_size > 1:
            counts = counts.reshape(-1, dispatcher.tp_size, self.config.num_moe_experts)
            load = counts.sum(1)
        else:
            load = counts.reshape(-1, self.config.num_moe_experts)
        if self.routed is not None:
            self.routed(load)
        self.loads.append(load)
        return counts

    def _divided(self, counts: Any, split: RankSplit) -> _Share:
        """The share of this rank in a split, of all source ranks with several tensor-parallel ones.

        counts: int64 [source_rank, tensor_rank, expert]; not read with one tensor-parallel rank.
        """
        rank, part, expert = self.ep_group.rank(), self._logical.tp_rank, split.expert
        self.served.append(split.tokens)
        if self._logical.tp_size == 1:
            return self._on_device(expert, split.served, split.first[0], split.last[0])
        # A source's tokens go to the instances of their expert in the order of physical numbers. Tensor-parallel ranks
        # of one source hold its tokens one after the other.
        index = expert if self.device is not None else expert.numpy()
        by_instance = counts[:, :, index]  # [source_rank, tensor_rank, physical]
        none, sent = by_instance * 0, (counts.cumsum(1) - counts)[:, :, index]
        first = (split.first[:, None] - sent).clip(none, by_instance)
        last = (split.last[:, None] - sent).clip(none, by_instance)
        return self._on_device(expert, last - first, first[rank, part], last[rank, part])

    def _on_device(self, expert: torch.Tensor, sent: Any, first: Any, last: Any) -> _Share:
        """The share of counts [source_rank, .., physical] and an interval [physical], as tensors."""
        parts = sent.reshape(-1), first, last
        counts, *interval = (torch.from_numpy(part) if self.device is None else part for part in parts)
        return _Share(counts, expert, tuple(interval))

    def postprocess(self, output: torch.Tensor, shared_expert_output: torch.Tensor | None) -> torch.Tensor:
        dispatcher = self.token_dispatcher
        reorders = dispatcher is self._physical and isinstance(dispatcher, MoEAlltoAllTokenDispatcher)
        # Transformer Engine's fused permutation has its own order, which is not known here.
        if reorders and self.config.moe_router_topk > 2 and not self.config.moe_permute_fusion:
            # A token's outputs are summed in the order of rows, and sums of three or more depend on it. Rows are in the
            # order of physical experts; sort them into that of logical experts, as without replicas.
            token, routed = dispatcher.reversed_local_input_permutation_mapping, dispatcher.routing_map
            # The number of rows is known, so that the host need not wait for the GPU.
            assert self._in_use is not None and self._in_use.expert is not None
            expert = self._in_use.expert.repeat_interleave(routed.sum(dim=0), output_size=len(token))
            order = torch.argsort(expert * len(routed) + token, stable=True)
            dispatcher.reversed_local_input_permutation_mapping = token[order]
            output = output.index_select(0, order)
        output = super().postprocess(output, shared_expert_output)
        if self.training and self.active:
            self._begin_compute()
        return output


def _groups_of(dispatcher: Any) -> Any:
    from megatron.core.process_groups_config import ProcessGroupCollection

    return ProcessGroupCollection(ep=dispatcher.ep_group, expt_tp=dispatcher.tp_group, tp_ep=dispatcher.tp_ep_group)

"""One rank of `benchmarks.experts.emulated`: layers of timed experts with real token exchanges and real replicas.

Megatron's MoE layer runs as it is: its alltoall dispatcher sends every token over gloo. Balanced layers are those of
`megatron.balanced.experts.moe_layer`, with replicas in `balancing.experts.engine.slots`. Three parts are replaced. The
router repeats recorded counts. An expert is the identity and occupies the device for as long as its tokens would take
(`balancing.clock.pace`), in whole tiles, twice that in the backward pass. Attention is a timed wait, too.

    python -m benchmarks.emulated ... -- -m benchmarks.experts.emulated_rank JOB...

JOB is a folder with job.json and loads.npz, which the launcher writes; several on the same machine run one after the
other. Rank 0 prints one line of JSON for each step.
Every step checks its results: tokens return unchanged, replicas had the weights of their experts, and every home expert
has the gradient of all its tokens.
"""

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from balancing.experts.config import ExpertConfig
from benchmarks.emulated.device import Device
from benchmarks.replaced import replace_name

__all__ = ["Variant", "routing_map"]

_TIMEOUT = timedelta(seconds=300)


@dataclass(frozen=True)
class Variant:
    """One configuration of the layers.

    name: of the method.
    planner: of replicas; None for Megatron's own layer.
    even: whether tokens are spread equally over experts, whatever was recorded.
    slots: number of slots of a rank.
    late: number of its late slots.
    knows: what the planner knows: "balance" alone, or costs too, with transfers "exposed" (Eq. 6) or "hidden" (Eq. 8).
    posting: "whole"; "parts", when compute begins, which leaves the links to exchanges of tokens; or "chosen": in
        parts, but the first layer's gradients whole.
    """

    name: str
    planner: str | None = None
    even: bool = False
    slots: int = ExpertConfig().replica_slots
    late: int = 0
    knows: str = "hidden"
    posting: str = "chosen"


class _Compute(torch.autograd.Function):
    """The identity on tokens [token, hidden], which takes `seconds`. The weight's gradient is their number everywhere.

    A home expert counts its tokens instead, since its gradient need not be sent; a replica returns a gradient.
    """

    @staticmethod
    def forward(ctx: Any, tokens: torch.Tensor, weight: torch.Tensor | None, device: Device, seconds: float) -> Any:
        ctx.weight, ctx.device, ctx.seconds, ctx.count = weight, device, seconds, len(tokens)
        device.run(seconds)
        return tokens.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, None, None]:
        ctx.device.run(2 * ctx.seconds)
        weight, gradient = ctx.weight, None
        if hasattr(weight, "tokens"):
            weight.tokens += ctx.count
        elif weight is not None:
            gradient = torch.full_like(weight, ctx.count)
        return gradients[0].clone(), gradient, None, None


class _Expert(torch.nn.Module):
    """A timed expert. Its weights are one vector, filled with the expert's number."""

    def __init__(self, device: Device, expert: int, size: int, tile: int, seconds_per_token: float) -> None:
        super().__init__()
        self._device, self._tile, self._seconds = device, tile, seconds_per_token
        self.weight = torch.nn.Parameter(torch.full((size,), expert, dtype=torch.bfloat16))

    def forward(self, tokens: torch.Tensor, probs: torch.Tensor) -> tuple[torch.Tensor, None]:
        computed = -(-len(tokens) // self._tile) * self._tile
        output = _Compute.apply(tokens, self.weight, self._device, computed * self._seconds)
        return output * probs.unsqueeze(-1), None


class _Router(torch.nn.Module):
    """A router that returns `routing`, a bool map [token, expert]."""

    def __init__(self, **unused: Any) -> None:
        super().__init__()
        self.routing: torch.Tensor | None = None

    def forward(self, hidden: torch.Tensor, padding_mask: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        assert self.routing is not None, "no routing was given"
        return self.routing / self.routing.sum(1, keepdim=True), self.routing


def routing_map(counts: np.ndarray, top_k: int) -> torch.Tensor:
    """A bool map [token, expert] with these counts [expert] and `top_k` different experts for each token.

    The counts sum to tokens * top_k, and none exceeds the number of tokens.
    """
    tokens = int(counts.sum()) // top_k
    assert counts.sum() == tokens * top_k and counts.max() <= tokens, "no token can go twice to an expert"
    expert = np.repeat(np.arange(len(counts)), counts)
    routing = torch.zeros(tokens, len(counts), dtype=torch.bool)
    routing[torch.arange(len(expert)) % tokens, torch.as_tensor(expert)] = True
    return routing


class _Model:
    """The layers of one variant on this rank, and their slots."""

    def __init__(self, variant: Variant, job: dict[str, Any], device: Device, groups: Any) -> None:
        from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules

        from megatron.balanced.experts.exchange import balance_layer

        self.variant, self._device, self._attention = variant, device, float(job["attention_seconds"])
        config, weights = _config(job), int(job["weights"])
        timing = int(job["tile"]), float(job["token_seconds"])

        def experts(local: int, config: Any, *, pg_collection: Any, **unused: Any) -> torch.nn.Module:
            first = dist.get_rank(groups.ep) * local
            return _experts([_Expert(device, first + n, weights, *timing) for n in range(local)], config)

        parts = MoESubmodules(experts=experts, router=_Router)
        self.layers: list[Any] = [MoELayer(config, parts, number + 1, groups) for number in range(job["layers"])]
        if variant.planner is not None:
            for layer in self.layers:
                balance_layer(layer, variant.slots, variant.late).late_least = int(job["late_least"])
        self.slots: Any = None
        self.late: Any = None
        for weight in self._home_weights():
            weight.main_grad, weight.tokens = torch.zeros_like(weight, dtype=torch.float32), 0
        if variant.planner is not None:
            self.slots = _slots(self.layers, variant, groups.transfers, float(job["expert_share"]))
        if variant.late:
            self.late = _late_slots(self.layers, variant, groups.late)

    def _home_weights(self) -> list[Any]:
        return [expert.weight for layer in self.layers for expert in layer.experts.local_experts]

    def step(self, routing: Sequence[Sequence[torch.Tensor]], placements: Sequence[Any]) -> float:
        """One iteration; returns its seconds. routing: [micro-batch][layer], maps. placements: [layer]."""
        hidden = torch.ones(len(routing[0][0]), 1, self.layers[0].config.hidden_size)
        for weight in self._home_weights():
            weight.main_grad.zero_()
            weight.tokens = 0
        dist.barrier()
        begin = time.perf_counter()
        if self.slots is not None:
            for layer, placement in zip(self.layers, placements, strict=True):
                layer.loads.clear()
                layer.served.clear()
                layer.place(placement)
            for slots in filter(None, (self.slots, self.late)):
                slots.begin_step(placements, len(routing))
        for maps in routing:
            output = self._forward(hidden.clone().requires_grad_(), maps)
            assert torch.equal(output, hidden), "tokens did not come back as they left"
            output.sum().backward()
        for slots in filter(None, (self.slots, self.late)):
            slots.end_step()
        span = torch.tensor([-begin, time.perf_counter()], dtype=torch.float64)  # one clock for all ranks of a machine
        dist.all_reduce(span, op=dist.ReduceOp.MAX)
        return float(span.sum())

    def _forward(self, hidden: torch.Tensor, maps: Sequence[torch.Tensor]) -> torch.Tensor:
        for layer, routing in zip(self.layers, maps, strict=True):
            layer.router.routing = routing
            hidden, _ = layer(_Compute.apply(hidden, None, self._device, self._attention))
        return hidden

    def check(self, load: np.ndarray, placements: Sequence[Any]) -> None:
        """Check the last step. load: int [source_rank, layer, micro_batch, expert]. placements: [layer]."""
        expected = load.sum((0, 2)).reshape(len(self.layers), -1)
        for number, layer in enumerate(self.layers):
            for expert in layer.experts.local_experts:
                weight, tokens = expert.weight, expected[number, int(expert.weight[0])]
                # A replica's gradient is rounded to bfloat16 before it is added.
                gradient = weight.main_grad + weight.tokens
                torch.testing.assert_close(gradient, torch.full_like(gradient, tokens), rtol=0.01, atol=0.1)
            if self.slots is not None:
                for expert, leaves in zip(
                    placements[number].slots_of(dist.get_rank()), self.slots.leaves(number), strict=True
                ):
                    assert expert < 0 or (leaves[0] == expert).all(), f"slot of expert {expert} holds other weights"


def _experts(local: list[_Expert], config: Any) -> torch.nn.Module:
    """Timed experts with replicas, in place of Megatron's sequential ones."""
    from megatron.balanced.experts.replicated import ReplicatedSequentialMLP

    class PacedExperts(ReplicatedSequentialMLP):
        def __init__(self) -> None:
            torch.nn.Module.__init__(self)
            self.config = config
            self.local_experts, self.num_local_experts = torch.nn.ModuleList(local), len(local)

    return PacedExperts()


def _slots(layers: Sequence[Any], variant: Variant, group: Any, expert_share: float) -> Any:
    from balancing.experts.engine.slots import ReplicaSlots

    class InParts(ReplicaSlots):
        """Slots that post also the gradients of the first layer when compute begins."""

        def _gradient_shares(self, number: int) -> Sequence[float]:
            return super()._gradient_shares(number) if number else (0.0, 1.0)

    slots = (InParts if variant.posting == "parts" else ReplicaSlots)(
        _homes(layers),
        variant.slots,
        group,
        shared=False,
        expert_share=expert_share if variant.posting != "whole" else None,
    )
    for position, layer in enumerate(layers):
        layer.experts.slots, layer.experts.position = slots, position
    return slots


def _late_slots(layers: Sequence[Any], variant: Variant, group: Any) -> Any:
    from balancing.experts.engine.late_slots import LateSlots

    slots = LateSlots(_homes(layers), variant.late, group)
    for layer in layers:
        layer.experts.late_slots = slots
    return slots


def _homes(layers: Sequence[Any]) -> Any:
    from balancing.experts.engine.slots import HomeExperts

    homes = [[list(expert.parameters()) for expert in layer.experts.local_experts] for layer in layers]
    return HomeExperts(homes, gradient=lambda weight: weight.main_grad)


def _config(job: dict[str, Any]) -> Any:
    from megatron.core.transformer.transformer_config import TransformerConfig

    return TransformerConfig(
        num_layers=job["layers"],
        hidden_size=job["hidden"],
        num_attention_heads=1,
        num_moe_experts=job["experts"],
        moe_router_topk=job["top_k"],
        moe_token_dispatcher_type="alltoall",
        expert_model_parallel_size=dist.get_world_size(),
        add_bias_linear=False,
    )


def _groups() -> Any:
    """Expert parallelism over all ranks, no other parallelism, and a group of all ranks for transfers."""
    from megatron.core.process_groups_config import ProcessGroupCollection

    groups = ProcessGroupCollection()
    groups.ep = groups.tp_ep = dist.group.WORLD
    for rank in range(dist.get_world_size()):
        alone = dist.new_group([rank], timeout=_TIMEOUT)
        if rank == dist.get_rank():
            groups.tp = groups.expt_tp = groups.cp = groups.tp_cp = alone
    everyone = list(range(dist.get_world_size()))
    groups.transfers, groups.late = (dist.new_group(everyone, timeout=_TIMEOUT) for _ in range(2))
    return groups


def _patch(piece_bytes: int) -> None:
    """Patch Megatron's dispatcher as training with balanced experts does, and scale the pieces of transfers."""
    from megatron.core.transformer.moe import token_dispatcher

    from balancing.experts.engine import relay
    from megatron.balanced.experts.known_counts import with_known_counts

    gather = token_dispatcher.gather_from_sequence_parallel_region
    replace_name(token_dispatcher, "gather_from_sequence_parallel_region", with_known_counts(gather))
    replace_name(relay, "_PIECE_BYTES", piece_bytes)


def _run(folders: list[Path]) -> None:
    jobs = [json.loads((folder / "job.json").read_text()) for folder in folders]
    _patch(jobs[0]["piece_bytes"])
    groups = _groups()
    for number, (folder, job) in enumerate(zip(folders, jobs, strict=True)):
        _run_job(number, job, dict(np.load(folder / "loads.npz")), groups)


def _run_job(number: int, job: dict[str, Any], loads: dict, groups: Any) -> None:
    rank, device = dist.get_rank(), Device()
    maps = {kind: [_maps(step[rank], job["top_k"]) for step in loads[kind]] for kind in ("recorded", "even")}
    variants = [Variant(**each) for each in job["variants"]]
    models = {variant.name: _Model(variant, job, device, groups) for variant in variants}
    for at in [-1, *range(len(loads["recorded"]))]:
        for variant in variants:
            line = _step(at, variant, models[variant.name], job, loads, maps)
            if line and rank == 0:
                print(json.dumps({"variant": variant.name, "job": number, "step": at, **line}), flush=True)


def _maps(counts: np.ndarray, top_k: int) -> list[list[torch.Tensor]]:
    """[micro-batch][layer], from counts [layer, micro_batch, expert]."""
    return [[routing_map(layer, top_k) for layer in batch] for batch in counts.swapaxes(0, 1)]


def _step(
    at: int, variant: Variant, model: _Model, job: dict[str, Any], loads: dict, maps: dict
) -> dict[str, float] | None:
    """One step; returns what was measured, but of the warm-up, step -1."""
    from balancing.experts.placement import ReplicaPlacement, contiguous_homes

    kind, warm_up, number = "even" if variant.even else "recorded", at < 0, max(at, 0)
    load, ranks = loads[kind][number], dist.get_world_size()
    placements = []
    if variant.planner is not None:
        home, split = contiguous_homes(job["experts"], ranks), job["split"][variant.name]
        plans = loads[f"slots of {variant.name}"][number]
        node = job["ranks_per_node"], job["nics_per_node"]
        placements = [ReplicaPlacement(home, plan, split, *node) for plan in plans]
    routing = maps[kind][number][:1] if warm_up else maps[kind][number]
    seconds = model.step(routing, placements)
    model.check(load[:, :, :1] if warm_up else load, placements)
    traffic = model.slots.take_statistics() if model.slots is not None else None
    if warm_up:
        return None
    served = _served(model, load, ranks)
    own = [traffic.exposed_seconds, traffic.weight_bytes + traffic.gradient_bytes] if traffic else [0.0] * 2
    most = torch.tensor(own, dtype=torch.float64)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    imbalance = float(np.mean(served.max(-1) / served.mean(-1)))
    return {"seconds": seconds, "exposed": float(most[0]), "sent_bytes": float(most[1]), "imbalance": imbalance}


def _served(model: _Model, load: np.ndarray, ranks: int) -> np.ndarray:
    """Tokens that each rank computed: [layer, micro_batch, rank]."""
    total = load.sum(0)
    at_home = total.reshape(*total.shape[:2], ranks, -1).sum(-1)
    if model.slots is None:
        return at_home
    # Layers without replicas tell nothing: their tokens are at home.
    return np.array([layer.served or home for layer, home in zip(model.layers, at_home.tolist(), strict=True)])


def main() -> None:
    from megatron.balanced.cpu.device import use_cpu

    use_cpu()
    dist.init_process_group("gloo", timeout=_TIMEOUT)
    with torch.random.fork_rng(devices=[]):
        _run([Path(folder) for folder in sys.argv[1:]])
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

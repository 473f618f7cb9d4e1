"""An MoE layer with replicas beside Megatron-LM's own, the report's hooks on a layer, and the wrapper of a schedule.

Layers are those of megatron.core on the CPU device (`megatron.balanced.cpu`), with a few tokens of a few numbers. The
device's function mode adds to every operation of torch, of Megatron-LM's and of ours alike, so the ratios count here,
and additions are timed under it, too. The split of tokens is one launch, as on a GPU. A step begins and ends around
each pass of an MoE layer, where in training it has many layers and micro-batches.
"""

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks.host.counting import Counted, Measured, fake_ranks, measure
from benchmarks.replaced import replace_name

__all__ = ["REPLICAS", "Sizes", "expert_ranks", "experts", "moe_layer", "preprocessing", "report"]

_HIDDEN = 32
REPLICAS = 2  # of a rank, at most
_LAYERS = 4  # that the report times
_WITHOUT, _WITH, _HOOKS = 1.02, 1.15, 1.01  # goals


class Sizes(NamedTuple):
    """An MoE layer. tokens, experts: of a rank. topk: experts of a token."""

    hidden: int = _HIDDEN
    ffn_hidden: int = _HIDDEN
    tokens: int = 64
    topk: int = 2
    experts: int = 4
    dtype: torch.dtype = torch.float32


_SIZES = Sizes()


@contextmanager
def expert_ranks(ranks: int, device: str = "cpu") -> Iterator[None]:
    """megatron.core on a device, as the first of fake expert-parallel ranks."""
    from megatron.balanced.cpu.device import is_cpu, use_cpu

    if device == "cpu" and not is_cpu():
        use_cpu()
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    with fake_ranks(0, ranks):
        parallel_state.initialize_model_parallel(expert_model_parallel_size=ranks, create_gloo_process_groups=False)
        model_parallel_cuda_manual_seed(1, force_reset_rng=True)
        try:
            yield
        finally:
            parallel_state.destroy_model_parallel()


def _row(case: str, measured: Measured, ratio: float | None, goal: float | None) -> dict[str, Any]:
    counted = measured.counted
    found = {"case": case, "seconds": measured.seconds, "additions": measured.additions, "launches": counted.launches}
    return found | {"messages": counted.messages, "calls": counted.calls, "ratio": [ratio, goal]}


def experts(quick: bool) -> list[dict[str, Any]]:
    """An MoE layer of Megatron-LM at several expert-parallel sizes, also with as many more experts as there are slots,
    and balanced with none, one and both slots full; experts one by one, and grouped by PyTorch's product, which a GPU
    has where it is the faster one."""
    rows = []
    for ranks in (4, 8) if quick else (4, 8, 64):
        with expert_ranks(ranks):
            own = measure(*moe_layer(ranks, None))
            rows.append(_row(f"EP {ranks}, Megatron-LM's", own, None, None))
            more = measure(*moe_layer(ranks, None, _SIZES._replace(experts=_SIZES.experts + REPLICAS)))
            rows.append(_row(f"EP {ranks}, with slots as experts", more, more.seconds / own.seconds, None))
            for full, gemm in itertools.product(range(REPLICAS + 1), ("megatron", "torch")):
                measured = measure(*moe_layer(ranks, full, gemm=gemm))
                case = f"EP {ranks}, {full} of {REPLICAS} slots full" if full else f"EP {ranks}, no replicas"
                case += ", grouped" * (gemm == "torch")
                rows.append(_row(case, measured, measured.seconds / own.seconds, _WITH if full else _WITHOUT))
    return rows


def preprocessing(quick: bool) -> list[dict[str, Any]]:
    """The part `moe_preprocess` of a layer, which a CUDA graph starts in one launch and balanced experts leave out of
    it: from the router to the dispatch of tokens, of Megatron-LM's layer and of a balanced one with full slots."""
    rows = []
    for ranks in (8,) if quick else (8, 64):
        with expert_ranks(ranks):
            for dispatcher in ("alltoall", "flex"):
                for case, full in (("Megatron-LM's", None), ("no replicas", 0), ("slots full", REPLICAS)):
                    measured = measure(*moe_layer(ranks, full, dispatcher=dispatcher, only_preprocess=True))
                    rows.append(_row(f"EP {ranks}, {dispatcher}, {case}", measured, None, None))
    return rows


def moe_layer(
    ranks: int,
    full: int | None,
    sizes: Sizes = _SIZES,
    *,
    device: str = "cpu",
    gemm: str = "megatron",
    dispatcher: str = "alltoall",
    only_preprocess: bool = False,
) -> tuple[Callable[[], None], Counted]:
    """Forward and backward of a layer, and what counts its kernels on the CPU device. Called under `expert_ranks`.

    full: slots with a replica on each rank; None for Megatron-LM's own layer.
    gemm: products of experts of a balanced layer, as in `balance_layer`.
    dispatcher: "flex" has HybridEP as its backend.
    only_preprocess: of that part alone.
    """
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.mlp import MLPSubmodules
    from megatron.core.transformer.moe import token_dispatcher
    from megatron.core.transformer.moe.experts import SequentialMLP
    from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron.balanced.experts.exchange import balance_layer
    from megatron.balanced.experts.known_counts import takes_known_counts, with_known_counts

    if not takes_known_counts():
        gather = token_dispatcher.gather_from_sequence_parallel_region
        replace_name(token_dispatcher, "gather_from_sequence_parallel_region", with_known_counts(gather))
    replace_name(token_dispatcher, "hybrid_ep_dispatch", token_dispatcher.hybrid_ep_dispatch or (lambda *unused: None))
    number = sizes.experts * ranks
    config = TransformerConfig(
        num_layers=1, num_attention_heads=4, hidden_size=sizes.hidden, moe_ffn_hidden_size=sizes.ffn_hidden,
        num_moe_experts=number, moe_router_topk=sizes.topk, moe_token_dispatcher_type=dispatcher,
        params_dtype=sizes.dtype, bf16=sizes.dtype is torch.bfloat16,
        moe_flex_dispatcher_backend="hybridep",
        expert_model_parallel_size=ranks, add_bias_linear=False, gated_linear_unit=True,
        activation_func=torch.nn.functional.silu, moe_router_load_balancing_type="none",
    )  # fmt: skip
    linears = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    layer: Any = MoELayer(config, MoESubmodules(experts=partial(SequentialMLP, submodules=linears)), layer_number=1)
    tokens = sizes.tokens
    chosen = torch.arange(tokens * sizes.topk, device=device).view(tokens, sizes.topk) % number
    routing_map = torch.zeros(tokens, number, dtype=torch.bool, device=device).scatter_(1, chosen, True)
    probs = (torch.rand(tokens, number, device=device) * routing_map).requires_grad_()
    layer.route = lambda hidden, padding_mask=None: (probs, routing_map)
    hidden = torch.randn(tokens, 1, sizes.hidden, dtype=sizes.dtype, device=device, requires_grad=True)
    grad = torch.randn_like(hidden)
    counted = Counted()
    slots = None
    if full is not None:
        if device == "cpu":
            _split_at_once(counted)
        balance_layer(layer, REPLICAS, gemm=gemm)
        slots = _fill(layer, ranks, full)
    if only_preprocess and full is not None:
        slots = layer.experts.slots = None  # replicas are sent in any case

    def both() -> None:
        if slots is not None:
            slots.begin_step([layer.placement], 1)
        if only_preprocess:
            sent = [part for part in layer.preprocess(hidden, probs, routing_map) if part.requires_grad]
            torch.autograd.backward(sent, list(map(torch.ones_like, sent)))
        else:
            layer(hidden)[0].backward(grad)
        if slots is not None:
            slots.end_step()
        if full is not None:
            layer.forget_passes()

    return both, counted


def _fill(layer: Any, ranks: int, full: int) -> Any:
    """Replicas of the next ranks' first experts in `full` slots of each rank."""
    import torch.distributed as dist

    from balancing.experts.engine.slots import HomeExperts, ReplicaSlots
    from balancing.experts.placement import ReplicaPlacement

    slot_expert = np.full((ranks, REPLICAS), -1)
    for slot in range(full):
        slot_expert[:, slot] = (np.arange(ranks) + 1) % ranks * layer.num_local_experts + slot
    layer.place(ReplicaPlacement(layer.placement.home, slot_expert))
    homes = [[list(expert.parameters()) for expert in layer.experts.local_experts]]
    sums = {id(weight): torch.zeros_like(weight) for weight in layer.experts.parameters()}
    held = HomeExperts(homes, gradient=lambda weight: sums[id(weight)])
    slots = ReplicaSlots(held, REPLICAS, dist.group.WORLD, shared=False)
    layer.experts.slots = slots
    return slots


def _split_at_once(counted: Counted) -> None:
    """Splits of tokens and routes on the device are made once, and then return at once."""
    from balancing.experts.placement import ReplicaPlacement
    from balancing.experts.split import split_kernel
    from balancing.experts.split.placed_split import split_on_host
    from balancing.experts.split.routes import route
    from balancing.experts.split.routes_kernel import Route
    from balancing.experts.split.split import Splitter
    from megatron.balanced.experts import moe_layer

    routed: list[torch.Tensor] = []

    class Routed(Route):
        @staticmethod
        def forward(ctx: Any, probs: torch.Tensor, routing_map: torch.Tensor, *split: torch.Tensor) -> Any:
            counted.launches += 1
            if not routed:
                routed.extend(route(routing_map, probs, *split))
            ctx.save_for_backward(split[0], routed[0])
            ctx.experts = probs.shape[1]
            return routed[0].detach(), routed[1].detach()

    class SplitKernels:
        route = staticmethod(lambda routing_map, probs, *split: Routed.apply(probs, routing_map, *split))

        def __init__(self, placement: ReplicaPlacement, classes: int, sweeps: int, tables: torch.Tensor) -> None:
            self._splitter, self._found = Splitter(placement, sweeps=sweeps or None), None

        def __call__(self, load: torch.Tensor, *how: Any) -> Any:
            counted.launches += 1
            if self._found is None:
                self._found = tuple(map(torch.as_tensor, split_on_host(self._splitter, load.numpy(), *how)[:4]))
            return self._found

    replace_name(split_kernel, "SplitKernels", SplitKernels)
    replace_name(split_kernel, "kernels_work", lambda ranks, device, late_slots=0: True)
    replace_name(moe_layer, "is_cpu", lambda: False)


def report() -> list[dict[str, Any]]:
    """Dense transformer layers without and with the report's hooks, and a schedule that does nothing, wrapped."""
    with expert_ranks(1):
        plain, watched = _dense_layers(watched=False), _dense_layers(watched=True)
        rows = [_row(f"{_LAYERS} dense layers", plain, None, None)]
        rows.append(_row("with the report's hooks", watched, watched.seconds / plain.seconds, _HOOKS))
        bare, wrapped = _schedule(wrapped=False), _schedule(wrapped=True)
        rows.append(_row("a schedule that does nothing", bare, None, None))
        rows.append(_row("wrapped", wrapped, None, None))
    return rows


def _dense_layers(*, watched: bool) -> Measured:
    """Forward and backward of transformer layers, one after another, with the hooks of a step that is measured if
    `watched`."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.spec_utils import build_module
    from megatron.core.transformer.transformer_config import TransformerConfig

    from balancing.clock import CpuClock
    from megatron.balanced.observe.timing_hooks import Step, TimingHooks

    config = TransformerConfig(
        num_layers=_LAYERS, num_attention_heads=4, hidden_size=_HIDDEN, attention_dropout=0.0, hidden_dropout=0.0
    )
    spec = get_gpt_layer_local_spec()
    layers = [build_module(spec, config=config, layer_number=number + 1) for number in range(_LAYERS)]
    hidden, grad = torch.randn(8, 1, _HIDDEN, requires_grad=True), torch.randn(8, 1, _HIDDEN)
    mask = torch.ones(1, 1, 8, 8).triu(1).bool()
    if watched:
        hooks = TimingHooks(CpuClock())
        for layer in layers:
            hooks.watch_layer(layer, 0)
        step = Step(0, 0.0, hooks.clock.mark())
        hooks.step = step

    def both() -> None:
        if watched:
            step.spans.clear()
        output = hidden
        for layer in layers:
            output = layer(output, mask)[0]
        output.backward(grad)

    return measure(both, Counted())


def _schedule(*, wrapped: bool) -> Measured:
    """A schedule that does nothing. wrapped: by the callbacks of a loop with no balancer."""
    from megatron.balanced.run import Run
    from megatron.balanced.shared.callbacks import StepCallback

    def schedule(**kwargs: Any) -> None:
        return None

    run: Callable[..., Any] = Run([StepCallback()]).around(schedule) if wrapped else schedule
    return measure(lambda: run(num_microbatches=1), Counted())

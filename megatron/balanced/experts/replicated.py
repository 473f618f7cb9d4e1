"""Experts of Megatron-LM with replicas as further experts of the same module.

While a rank holds replicas, it runs its home experts and its slots as one module of Megatron-LM's own class with more
experts: a twin that shares everything with the home experts but the weights of the slots. Sequential experts run one
after another. Transformer Engine's grouped linear layers (`--moe-grouped-gemm`) pass all weights to one grouped GEMM,
without a copy. Slots are not parameters, so they are in no optimizer, checkpoint or data-parallel gradient buffer.
Padding and quantization, activations and their recomputation, and fused accumulation of gradients are Megatron-LM's.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from megatron.core.transformer.moe.experts import SequentialMLP, TEGroupedMLP

from balancing.experts.engine.slots import ReplicaSlots

__all__ = [
    "ReplicatedExperts",
    "ReplicatedSequentialMLP",
    "ReplicatedTEGroupedMLP",
    "home_parameters",
    "on_backward",
]


class _OnBackward(torch.autograd.Function):
    """The identity, whose backward pass calls `act` before it returns the gradient."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, act: Callable[[], object]) -> torch.Tensor:
        ctx.act = act
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.act()
        return gradients[0], None


def on_backward(hidden: torch.Tensor, act: Callable[[], object]) -> torch.Tensor:
    """Call `act` in the backward pass, once the gradient of `hidden` is complete and before it is passed on. All
    gradients of weights that were computed by then have been accumulated. Returns the tensor to use as `hidden`."""
    if hidden.grad_fn is None:  # autograd accumulates gradients of leaves, such as weights and this, in any order
        return _OnBackward.apply(hidden, act)

    def hook(gradient: torch.Tensor) -> None:
        act()

    hidden.register_hook(hook)
    return hidden


def at_once(act: Callable[[], None]) -> None:
    """Call `act`."""
    act()


def home_parameters(experts: torch.nn.Module) -> list[list[torch.nn.Parameter]]:
    """[home expert] -> its parameters. experts: of an MoE layer with replicas."""
    if isinstance(experts, TEGroupedMLP):
        return [_parameters_of(experts, number) for number in range(experts.num_local_experts)]
    return [list(expert.parameters()) for expert in experts.local_experts]


def _parameters_of(experts: TEGroupedMLP, number: int) -> list[Any]:
    return [
        getattr(linear, f"{kind}{number}")
        for linear in (experts.linear_fc1, experts.linear_fc2)
        for kind in ("weight", "bias")
        if kind == "weight" or linear.use_bias
    ]


def _twin[Module: torch.nn.Module](module: Module, **changes: Any) -> Module:
    """A module that shares the parameters, hooks and submodules of `module`, but for attributes that differ."""
    twin: Module = object.__new__(type(module))
    twin.__dict__.update(module.__dict__, **changes)
    return twin


def _with_weights(module: torch.nn.Module, weights: Iterator[torch.Tensor]) -> torch.nn.Module:
    """A twin of `module` and its submodules with other weights, in the order of `parameters()`."""
    parameters = {name: None if own is None else next(weights) for name, own in module._parameters.items()}
    modules = {name: None if own is None else _with_weights(own, weights) for name, own in module._modules.items()}
    return _twin(module, _parameters=parameters, _modules=modules)


class ReplicatedExperts(torch.nn.Module):
    """What experts with replicas add to a class of Megatron-LM's experts.

    active: whether replicas are used; see `BalancedMoELayer.active`.
    ends_after_backward_dw: whether `backward_dw` ends a backward pass, after the gradients of inputs have been passed
        on (`--delay-wgrad-compute`).
    when_computed: calls its argument when the weight gradients of a backward pass have been computed.
    runs_one_by_one: whether replicas run after the home experts. Then the home experts run while the weights of
        replicas arrive, and compute their gradients while those of replicas return.
    """

    runs_one_by_one = False
    config: Any
    num_local_experts: int
    slots: ReplicaSlots | None = None  # set when the model is complete; None: no replicas
    position = 0  # among the MoE layers of the model chunk
    active = True
    when_computed = staticmethod(at_once)

    _bound: ReplicaSlots | None = None  # the slots that are experts of the modules in `_twins`
    _twins: dict[int, Any]  # number of slots -> homes and slots; in a dict, so that they are no submodules

    def prepare(self) -> None:
        """Called once, when the experts of a finished model get replicas."""
        self.ends_after_backward_dw = self.config.delay_wgrad_compute

    def forward(
        self,
        permuted_local_hidden_states: torch.Tensor,
        tokens_per_expert: torch.Tensor,
        permuted_probs: torch.Tensor,
        *buffers: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run the home experts and the replicas; returns float [token, hidden], and None for the bias.

        permuted_local_hidden_states: float [token, hidden], sorted by local physical expert.
        tokens_per_expert: int [local physical expert].
        permuted_probs: float [token], weight of the router.
        buffers: of dispatchers that read and write the experts' tensors in place; see `TEGroupedMLP.forward`.
        """
        slots, position, hidden = self.slots, self.position, permuted_local_hidden_states
        if slots is None or not (self.training and self.active):
            return super().forward(hidden, tokens_per_expert, permuted_probs, *buffers)
        # A backward pass reaches the output before the experts, and `hidden` after them.
        if not self.ends_after_backward_dw:
            hidden = on_backward(hidden, lambda: self.when_computed(lambda: self._end_pass(slots)))
        if not slots.is_used(position):
            return super().forward(hidden, tokens_per_expert, permuted_probs, *buffers)
        experts = self.with_slots(slots)
        if experts is self or not self.runs_one_by_one:
            slots.acquire(position, forward=True)
        counts = tokens_per_expert[: experts.num_local_experts]  # the slots behind are empty
        output, bias = experts.run(hidden, counts, permuted_probs, *buffers)
        return on_backward(output, lambda: self._begin_pass(slots, holds_none=experts is self)), bias

    def run(self, *inputs: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run the experts of this module, as Megatron-LM does."""
        result: tuple[torch.Tensor, torch.Tensor | None] = super().forward(*inputs)
        return result

    def with_slots(self, slots: ReplicaSlots) -> Any:
        """The module that has the slots as further experts. This one, if it has no replica."""
        number = self._slots_run(slots)
        if not number:
            return self
        if self._bound is not slots:
            self._bound, self._twins = slots, {}
        if number not in self._twins:
            self._twins[number] = self._bind(slots, number)
        return self._twins[number]

    def _slots_run(self, slots: ReplicaSlots) -> int:
        """Number of slots that run with the home experts: at least those up to the last replica, 0 without one."""
        raise NotImplementedError

    def _bind(self, slots: ReplicaSlots, number: int) -> Any:
        """A twin that has the first `number` slots as further experts."""
        raise NotImplementedError

    def backward_dw(self) -> None:
        """Compute the weight gradients that the backward pass has left out, then return those of replicas
        (`--delay-wgrad-compute`)."""
        self.compute_weight_gradients()
        if self.slots is not None and self.active and self.ends_after_backward_dw:
            self._end_pass(self.slots)

    def compute_weight_gradients(self) -> None:
        """Compute the weight gradients that the backward pass has left out."""
        raise NotImplementedError

    def _begin_pass(self, slots: ReplicaSlots, holds_none: bool) -> None:
        """A backward pass comes to the experts. holds_none: whether this rank holds no replica of the layer."""
        slots.acquire(self.position, forward=False)
        if holds_none and self._returns_early:
            self.return_gradients(slots)  # those of other ranks' replicas, at the point where these send them

    @property
    def _returns_early(self) -> bool:
        """Whether gradients of replicas return before the home experts compute theirs."""
        return self.runs_one_by_one and not self.ends_after_backward_dw

    def return_gradients(self, slots: ReplicaSlots) -> None:
        """The gradients of replicas are there, or will be when those that the backward pass has left out are."""
        self.when_computed(lambda: slots.accumulate_gradients(self.position))

    def _end_pass(self, slots: ReplicaSlots) -> None:
        if slots.is_used(self.position) and not self._returns_early:
            slots.accumulate_gradients(self.position)
        slots.end_pass(self.position)


class ReplicatedSequentialMLP(ReplicatedExperts, SequentialMLP):
    """Megatron's sequential experts, followed by the replicas in the slots: a slot runs a home expert's module on the
    replica's weights."""

    runs_one_by_one = True

    def prepare(self) -> None:
        super().prepare()
        # Fused accumulation adds a weight's gradient to its data-parallel buffer, which a replica does not have. So
        # these experts return their gradients to autograd. The rest of the model keeps the fusion.
        for linear in self.modules():
            if getattr(linear, "gradient_accumulation_fusion", False):
                linear.gradient_accumulation_fusion = False

    def compute_weight_gradients(self) -> None:
        """Nothing is left out: linear layers of megatron.core compute theirs in the backward pass."""

    def _slots_run(self, slots: ReplicaSlots) -> int:
        return slots.held(self.position)

    def _bind(self, slots: ReplicaSlots, number: int) -> Any:
        homes, position = list(self.local_experts), self.position
        replicas = [_with_weights(homes[0], iter(leaves)) for leaves in slots.leaves(position)[:number]]
        run = replicas[0].forward

        def forward(hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            slots.acquire(position, forward=True)
            if self._returns_early:
                # A backward pass comes to the first replica after the others, and before the home experts. A hook on
                # `hidden`, which was split off from the tokens of all, would wait for all.
                hidden = _OnBackward.apply(hidden, lambda: self.return_gradients(slots))
            return run(hidden, *args, **kwargs)

        replicas[0] = _twin(replicas[0], forward=forward)
        experts = {str(place): expert for place, expert in enumerate([*homes, *replicas])}
        modules = self._modules | {"local_experts": _twin(self.local_experts, _modules=experts)}
        return _twin(self, _modules=modules, num_local_experts=len(experts))


class ReplicatedTEGroupedMLP(ReplicatedExperts, TEGroupedMLP):
    """Transformer Engine's grouped experts, followed by the replicas in the slots."""

    _homes: "tuple[ReplicatedTEGroupedMLP] | None" = None  # of a module with slots; in a tuple: no submodule

    def run(self, *inputs: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        if self._homes is None:
            return super().run(*inputs)
        linears = [(getattr(self._homes[0], name), getattr(self, name)) for name in ("linear_fc1", "linear_fc2")]
        for linear, twin in linears:
            twin.is_first_microbatch = linear.is_first_microbatch
        result = super().run(*inputs)
        for linear, twin in linears:
            linear.is_first_microbatch = twin.is_first_microbatch
        return result

    def compute_weight_gradients(self) -> None:
        # The replicas stay the same for all passes of an iteration.
        is_plain = self.slots is None or not self.active
        TEGroupedMLP.backward_dw(self if is_plain else self.with_slots(self.slots))

    def _slots_run(self, slots: ReplicaSlots) -> int:
        return slots.slots if slots.held(self.position) else 0  # always all: each module quantizes its weights anew

    def _bind(self, slots: ReplicaSlots, number: int) -> Any:
        homes = self.num_local_experts
        leaves = [iter(replica) for replica in slots.leaves(self.position)]
        modules = dict(self._modules)
        for name in ("linear_fc1", "linear_fc2"):
            linear: Any = self._modules[name]
            further = {}
            for place, parts in enumerate(leaves, homes):  # in the order of `_parameters_of`
                further[f"weight{place}"] = next(parts)
                further[f"bias{place}"] = next(parts) if linear.use_bias else linear.bias0
            modules[name] = _twin(
                linear,
                **further,
                num_gemms=homes + number,
                # Quantizers are made for each weight, at the first use.
                fp8_initialized=False,
                fp8_meta_tensors_initialized=False,
                fp8_meta={"fp8_checkpoint": False, "fp8_group": None},
                quantizers={"scaling_fwd": [], "scaling_bwd": []},
            )
        for name in ("quantization_padding", "quantization_unpadding"):
            if name in modules:
                padding: Any = modules[name]
                modules[name] = type(padding)(homes + number, align_size=padding.align_size)
        return _twin(self, _modules=modules, num_local_experts=homes + number, _fused_ops=None, _homes=(self,))

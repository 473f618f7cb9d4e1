"""Replicas as further weights of Transformer Engine's grouped experts (`--moe-grouped-gemm`).

Transformer Engine's grouped linear layer keeps one weight for each expert and passes all of them to one grouped GEMM.
Replicas are further weights of this GEMM, without a copy. They are not parameters, so they are in no optimizer,
checkpoint or data-parallel gradient buffer. Everything else is Megatron-LM's own `TEGroupedMLP` with more experts:
padding and quantization, the activation and its recomputation, and fused accumulation of gradients.
"""

from typing import Any

import torch
from megatron.core.transformer.moe.experts import TEGroupedMLP

from balancing.experts.engine.slots import ReplicaSlots
from megatron.balanced.experts.moe_layer import _OnBackward, at_once

__all__ = ["ReplicatedTEGroupedMLP", "home_parameters"]


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


class ReplicatedTEGroupedMLP(TEGroupedMLP):
    """Transformer Engine's grouped experts, followed by the replicas in the slots.

    active, ends_after_backward_dw, when_computed: as in `ReplicatedSequentialMLP`.
    """

    slots: ReplicaSlots | None = None  # set when the model is complete; None: no replicas
    position = 0  # among the MoE layers of the model chunk
    active = True
    when_computed = staticmethod(at_once)

    _bound: ReplicaSlots | None = None  # the slots that are weights of the module in `_physical`
    _physical: tuple[TEGroupedMLP] | None = None  # homes and slots; in a tuple, so that it is no submodule

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
            hidden = _OnBackward.apply(hidden, lambda: self.when_computed(lambda: self._end_pass(slots)))
        if not slots.is_used(position):
            return super().forward(hidden, tokens_per_expert, permuted_probs, *buffers)
        slots.acquire(position, forward=True)
        if slots.is_held(position):
            output, bias = self._with_slots(slots, hidden, tokens_per_expert, permuted_probs, *buffers)
        else:
            homes = tokens_per_expert[: self.num_local_experts]
            output, bias = super().forward(hidden, homes, permuted_probs, *buffers)
        return _OnBackward.apply(output, lambda: slots.acquire(position, forward=False)), bias

    def backward_dw(self) -> None:
        """Compute the weight gradients that the backward pass has left out, then return those of replicas
        (`--delay-wgrad-compute`)."""
        self.compute_weight_gradients()
        if self.slots is not None and self.active and self.ends_after_backward_dw:
            self._end_pass(self.slots)

    def compute_weight_gradients(self) -> None:
        """Compute the weight gradients that the backward pass has left out."""
        slots = self.slots
        # The replicas stay the same for all passes of an iteration.
        holds = slots is not None and self.active and slots.is_held(self.position)
        TEGroupedMLP.backward_dw(self._homes_and(slots) if holds else self)

    def _end_pass(self, slots: ReplicaSlots) -> None:
        if slots.is_used(self.position):
            slots.accumulate_gradients(self.position)
        slots.end_pass(self.position)

    def _homes_and(self, slots: ReplicaSlots) -> TEGroupedMLP:
        """The module that has the slots as further experts."""
        if self._physical is None or self._bound is not slots:
            self._physical, self._bound = (self._bind(slots),), slots
        return self._physical[0]

    def _with_slots(
        self, slots: ReplicaSlots, *inputs: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run the homes and the replicas of this rank as one."""
        physical = self._homes_and(slots)
        home_linears = self.linear_fc1, self.linear_fc2
        linears = physical.linear_fc1, physical.linear_fc2
        for linear, twin in zip(home_linears, linears, strict=True):
            twin.is_first_microbatch = linear.is_first_microbatch
        result = TEGroupedMLP.forward(physical, *inputs)
        for linear, twin in zip(home_linears, linears, strict=True):
            linear.is_first_microbatch = twin.is_first_microbatch
        return result

    def _bind(self, slots: ReplicaSlots) -> TEGroupedMLP:
        homes = self.num_local_experts
        leaves = [iter(replica) for replica in slots.leaves(self.position)]
        modules = dict(self._modules)
        for name in ("linear_fc1", "linear_fc2"):
            linear: Any = self._modules[name]
            further = {}
            for number, parts in enumerate(leaves, homes):  # in the order of `_parameters_of`
                further[f"weight{number}"] = next(parts)
                further[f"bias{number}"] = next(parts) if linear.use_bias else linear.bias0
            modules[name] = _twin(
                linear,
                **further,
                num_gemms=homes + len(leaves),
                # Quantizers are made for each weight, at the first use.
                fp8_initialized=False,
                fp8_meta_tensors_initialized=False,
                fp8_meta={"fp8_checkpoint": False, "fp8_group": None},
                quantizers={"scaling_fwd": [], "scaling_bwd": []},
            )
        for name in ("quantization_padding", "quantization_unpadding"):
            if name in modules:
                padding: Any = modules[name]
                modules[name] = type(padding)(homes + len(leaves), align_size=padding.align_size)
        return _twin(self, _modules=modules, num_local_experts=homes + len(leaves), _fused_ops=None)

"""Experts of Megatron-LM with replicas as further experts of the same module.

While a rank holds replicas, it runs its home experts and its slots as one module of Megatron-LM's own class with more
experts: a twin that shares everything with the home experts but the weights of the slots. Sequential experts run one
after another. Transformer Engine's grouped linear layers (`--moe-grouped-gemm`) pass all weights to one grouped GEMM,
without a copy. Slots are not parameters, so they are in no optimizer, checkpoint or data-parallel gradient buffer.
Padding and quantization, activations and their recomputation, and fused accumulation of gradients are Megatron-LM's.
"""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.core.transformer.moe.experts import SequentialMLP, TEGroupedMLP

from balancing.experts.engine.late_slots import LateChains, LateSlots
from balancing.experts.engine.slots import ReplicaSlots
from megatron.balanced.experts.twins import pack, twin_of, with_further_experts

__all__ = [
    "ReplicatedExperts",
    "ReplicatedSequentialMLP",
    "ReplicatedTEGroupedMLP",
    "later",
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


def later(module: torch.nn.Module, method: str, *args: Any) -> Callable[[], None]:
    """Calls a method of `module`, which it does not keep alive. Tensors that outlive a step hold its graph, and through
    it what is called in its backward pass, where Python's collector does not see it."""
    owner = weakref.ref(module)

    def act() -> None:
        module = owner()
        assert module is not None, "a backward pass through a module that is gone"
        getattr(module, method)(*args)

    return act


def at_once(act: Callable[[], None]) -> None:
    """Call `act`."""
    act()


class ReplicatedExperts(torch.nn.Module):
    """What experts with replicas add to a class of Megatron-LM's experts.

    active: whether replicas are used; see `BalancedMoELayer.active`.
    late_slots: slots behind those of `slots`, for late copies; None for none.
    late: the late copies of the pass in progress, if it has some.
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
    late_slots: LateSlots | None = None
    late: LateChains | None = None
    position = 0  # among the MoE layers of the model chunk
    active = True
    when_computed = staticmethod(at_once)

    # Attribute of linear layers that add weight gradients to data-parallel buffers, which replicas do not have.
    _fusion = ""
    _bound: ReplicaSlots | None = None  # the slots that are experts of the modules in `_twins`
    _twins: dict[tuple[int, int], Any]  # numbers of slots and of late ones -> the module; no submodules in a dict

    def prepare(self) -> None:
        """Called once, when the experts of a finished model get replicas."""
        self.ends_after_backward_dw = self.config.delay_wgrad_compute
        self._twins = {}
        # Such experts return their gradients to autograd. The rest of the model keeps the fusion.
        self._fused = [module for module in self.modules() if self._fusion and getattr(module, self._fusion, False)]
        for linear in self._fused:
            setattr(linear, self._fusion, False)

    def restore(self) -> None:
        """Undo what `prepare` has changed, when the experts become Megatron-LM's own again."""
        for linear in self._fused:
            setattr(linear, self._fusion, True)

    def forget_slots(self) -> None:
        """Keep nothing of the slots that replicas were in last."""
        self._bound = None
        self._twins.clear()

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
        if torch.is_grad_enabled() and not hidden.requires_grad and slots.trains(position):
            hidden = hidden.detach().requires_grad_()  # so that the backward pass of the experts has an end
        # A backward pass reaches the output before the experts, and `hidden` after them.
        if not self.ends_after_backward_dw:
            hidden = on_backward(hidden, later(self, "_pass_ends"))
        if not slots.is_used(position) and self.late_slots is None:
            return self.run(hidden, tokens_per_expert, permuted_probs, *buffers)
        experts = self.with_slots(slots)
        if experts is self or not self.runs_one_by_one:
            self.acquire()
        counts = tokens_per_expert[: experts.num_local_experts]  # the slots behind are empty
        if late := self._late_slots_run():  # and so are those before late slots
            first = self.num_local_experts + slots.slots
            counts = torch.cat([counts[: len(counts) - late], tokens_per_expert[first : first + late]])
        output, bias = experts.run(hidden, counts, permuted_probs, *buffers)
        return on_backward(output, later(self, "_begin_pass", experts is self, self.late)), bias

    def begin_late(self, late: LateChains | None, *, again: bool) -> None:
        """A pass begins, whose load is known. Parameters as of `LateSlots.begin_forward`."""
        assert self.late_slots is not None
        self.late = late
        self.late_slots.begin_forward(self.position, late, again=again)

    def acquire(self) -> None:
        """Wait for the weights of the replicas of a forward pass."""
        assert self.slots is not None
        if self.slots.is_used(self.position):
            self.slots.acquire(self.position, forward=True)
        if self.late is not None:
            assert self.late_slots is not None
            self.late_slots.acquire(self.position, forward=True)

    def run(self, *inputs: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run the experts of this module, by default as Megatron-LM does."""
        result: tuple[torch.Tensor, torch.Tensor | None] = super().forward(*inputs)
        return result

    def with_slots(self, slots: ReplicaSlots) -> Any:
        """The module that has the slots as further experts. This one, if it has no replica."""
        number, late = self._slots_run(slots), self._late_slots_run()
        if not number + late:
            return self
        if self._bound is not slots:
            self.forget_slots()
            self._bound = slots
        if (number, late) not in self._twins:
            leaves = slots.leaves(self.position)[:number]
            if self.late_slots is not None:
                leaves = [*leaves, *self.late_slots.leaves(self.position)[:late]]
            self._twins[number, late] = self._bind(leaves)
        return self._twins[number, late]

    def _late_slots_run(self) -> int:
        """Number of late slots that run in the pass in progress."""
        return 0 if self.late is None or self.late_slots is None else self.late_slots.held(self.position)

    def _slots_run(self, slots: ReplicaSlots) -> int:
        """Number of slots that run with the home experts: at least those up to the last replica, 0 without one."""
        return slots.held(self.position)

    def _bind(self, leaves: list[list[torch.Tensor]]) -> Any:
        """A twin that has slots with the parameters `leaves` as further experts."""
        raise NotImplementedError

    def backward_dw(self) -> None:
        """Compute the weight gradients that the backward pass has left out, then return those of replicas
        (`--delay-wgrad-compute`)."""
        self.compute_weight_gradients()
        if self.slots is not None and self.active and self.ends_after_backward_dw:
            self._end_pass()

    def compute_weight_gradients(self) -> None:
        """Compute the weight gradients that the backward pass has left out."""
        raise NotImplementedError

    def _begin_pass(self, holds_none: bool, late: LateChains | None) -> None:
        """A backward pass comes to the experts.

        holds_none: whether this rank holds no replica of the layer.
        late: the late copies of the pass.
        """
        assert self.slots is not None
        if self.slots.is_used(self.position):
            self.slots.acquire(self.position, forward=False)
        if self.late_slots is not None:
            self.late_slots.begin_backward(self.position, late)
        if holds_none and self._returns_early:
            self.return_gradients()  # those of other ranks' replicas, at the point where these send them

    @property
    def _returns_early(self) -> bool:
        """Whether gradients of replicas return before the home experts compute theirs."""
        return self.runs_one_by_one and not self.ends_after_backward_dw

    def return_gradients(self) -> None:
        """The gradients of replicas are there, or will be when those that the backward pass has left out are."""
        self.when_computed(self._accumulate)

    def _accumulate(self) -> None:
        for slots in (self.slots, self.late_slots):
            if slots is not None and slots.is_used(self.position):
                slots.accumulate_gradients(self.position)

    def _pass_ends(self) -> None:
        """A backward pass has left the experts."""
        self.when_computed(self._end_pass)

    def _end_pass(self) -> None:
        assert self.slots is not None
        if not self._returns_early:
            self._accumulate()
        self.slots.end_pass(self.position)


class ReplicatedSequentialMLP(ReplicatedExperts, SequentialMLP):
    """Megatron's sequential experts, followed by the replicas in the slots: a slot runs a home expert's module on the
    replica's weights."""

    runs_one_by_one = True
    _fusion = "gradient_accumulation_fusion"

    def compute_weight_gradients(self) -> None:
        """Nothing is left out: linear layers of megatron.core compute theirs in the backward pass."""

    def _bind(self, leaves: list[list[torch.Tensor]]) -> Any:
        twin = with_further_experts(self, leaves)
        experts = twin.local_experts._modules
        first = str(self.num_local_experts)
        run, acquire = experts[first].forward, later(self, "acquire")
        returns = later(self, "return_gradients") if self._returns_early else None

        def forward(hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            acquire()
            if returns is not None:
                # A backward pass comes to the first replica after the others, and before the home experts. A hook on
                # `hidden`, which was split off from the tokens of all, would wait for all.
                hidden = _OnBackward.apply(hidden, returns)
            return run(hidden, *args, **kwargs)

        experts[first] = twin_of(experts[first], forward=forward)
        return twin


class ReplicatedTEGroupedMLP(ReplicatedExperts, TEGroupedMLP):
    """Transformer Engine's grouped experts, followed by the replicas in the slots."""

    _pairs: Sequence[tuple[Any, Any]] = ()  # of a twin: the modules of home experts, and those with replicas

    def run(self, *inputs: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        pack(self._pairs)
        for module, twin in self._pairs:
            _copy_first(module, twin)
        result = super().run(*inputs)
        for module, twin in self._pairs:
            _copy_first(twin, module)
        return result

    def compute_weight_gradients(self) -> None:
        # The replicas stay the same for all passes of an iteration.
        is_plain = self.slots is None or not self.active
        TEGroupedMLP.backward_dw(self if is_plain else self.with_slots(self.slots))

    def _slots_run(self, slots: ReplicaSlots) -> int:
        return slots.slots if slots.held(self.position) else 0  # always all: each module quantizes its weights anew

    def _bind(self, leaves: list[list[torch.Tensor]]) -> Any:
        return with_further_experts(self, leaves)


def _copy_first(module: Any, twin: Any) -> None:
    """Let `twin` know what `module` knows: whether the micro-batch is the first, for which weights are quantized."""
    if hasattr(module, "is_first_microbatch"):
        twin.is_first_microbatch = module.is_first_microbatch

"""Experts of Megatron-LM whose products are PyTorch's grouped ones (`balancing.kernels.expert_products`).

The classes here differ from those of `megatron.balanced.experts.replicated` by their linear layers alone. All rows pass
through Megatron-LM's own `forward` at once, its activations, fusions and probabilities included: sequential experts as
one MLP, grouped ones as they are. Parameters remain the modules' own, in their buffers and checkpoints, and get their
gradients from autograd, as those of sequential experts with replicas do.

Which products a run has is measured once, when the balancer is made (`balancing.kernels.expert_choice`).
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.core import mpu
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.experts import SequentialMLP, TEGroupedMLP

from balancing.experts.config import ExpertConfig
from balancing.kernels.expert_choice import ExpertSizes, GemmChoice, choose_gemm
from balancing.kernels.expert_products import grouped_linear, rows_of_biases, torch_product
from megatron.balanced.cpu.device import is_cpu
from megatron.balanced.experts.parameters import is_grouped_linear
from megatron.balanced.experts.replicated import ReplicatedExperts, ReplicatedSequentialMLP, ReplicatedTEGroupedMLP
from megatron.balanced.experts.twins import twin_of, with_further_experts
from megatron.balanced.shared.job import Job

__all__ = ["ProductsOfSequentialMLP", "ProductsOfTEGroupedMLP", "choose_products", "own_products", "why_own_products"]


class _Linear(torch.nn.Module):
    """The linear layers of all experts of a rank, with grouped products.

    modules: theirs. Hooks that wait for gathered parameters are on these.
    weights, biases: return [expert] -> its own; biases return none without them.
    """

    def __init__(
        self,
        modules: Sequence[Any],
        weights: Callable[[], list[torch.Tensor]],
        biases: Callable[[], list[torch.Tensor]],
    ) -> None:
        super().__init__()
        self._owners, self._weights, self._biases = [*modules], weights, biases
        self._counts: list[int] = []
        self._scale: torch.Tensor | None = None

    def begin(self, counts: list[int], scale: torch.Tensor | None) -> None:
        """A pass begins. counts: rows of each expert. scale: [row], of the bias; None for 1."""
        self._counts, self._scale = counts, scale

    def forward(self, rows: torch.Tensor, *unused: Any) -> tuple[torch.Tensor, None]:
        for module in self._owners:
            for hook in module._forward_pre_hooks.values():
                hook(module, (rows,))
        scale, self._scale = self._scale, None  # whose graph is not kept
        output = grouped_linear(torch_product, rows, self._counts, self._weights())
        if biases := self._biases():
            bias = rows_of_biases(torch_product, self._counts, biases)
            output += bias if scale is None else bias * scale.unsqueeze(-1)
        return output, None


class _Products(ReplicatedExperts):
    """What experts with grouped products differ in from those with Megatron-LM's."""

    runs_one_by_one = False
    _grouped: tuple[Any, tuple[_Linear, _Linear]] | None = None  # a twin with other linear layers, and these
    _slots_run = ReplicatedExperts._slots_run

    def prepare(self) -> None:
        super().prepare()
        self._grouped = None

    def run(
        self, hidden: torch.Tensor, counts: torch.Tensor, probs: torch.Tensor, *buffers: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if self._grouped is None:
            self._grouped = self._with_grouped_products()
        twin, (first, second) = self._grouped
        rows = counts.tolist()
        first.begin(rows, None)
        second.begin(rows, None if self.config.moe_apply_probs_on_input else probs)
        result: tuple[torch.Tensor, torch.Tensor | None] = self._forward_of_class(twin, hidden, counts, probs)
        return result

    def _bind(self, leaves: list[list[torch.Tensor]]) -> Any:
        twin = with_further_experts(self, leaves)
        vars(twin)["_grouped"] = None
        return twin

    def _with_grouped_products(self) -> tuple[Any, tuple[_Linear, _Linear]]:
        raise NotImplementedError

    @staticmethod
    def _forward_of_class(twin: Any, *inputs: torch.Tensor) -> Any:
        raise NotImplementedError


class ProductsOfSequentialMLP(_Products, ReplicatedSequentialMLP):
    """Sequential experts as one MLP, whose linear layers are those of all experts."""

    _forward_of_class = staticmethod(SequentialMLP.forward)  # type: ignore[assignment]

    def _with_grouped_products(self) -> tuple[Any, tuple[_Linear, _Linear]]:
        experts = [*self.local_experts]

        def linear(name: str) -> _Linear:
            modules = [getattr(expert, name) for expert in experts]
            has_bias = modules[0].bias is not None
            return _Linear(
                modules, lambda: [m.weight for m in modules], lambda: [m.bias for m in modules] if has_bias else []
            )

        first, second = linear("linear_fc1"), linear("linear_fc2")
        one = twin_of(experts[0], _modules=experts[0]._modules | {"linear_fc1": first, "linear_fc2": second})
        # With one expert, Megatron-LM passes it all rows.
        local = self._modules | {"local_experts": torch.nn.ModuleList([one])}
        return twin_of(self, _modules=local, num_local_experts=1), (first, second)


class ProductsOfTEGroupedMLP(_Products, ReplicatedTEGroupedMLP):
    """Transformer Engine's grouped experts with the other products."""

    _forward_of_class = staticmethod(TEGroupedMLP.forward)  # type: ignore[assignment]

    _fusion = "fuse_wgrad_accumulation"

    def _with_grouped_products(self) -> tuple[Any, tuple[_Linear, _Linear]]:
        def linear(module: Any) -> _Linear:
            def of(kind: str) -> list[torch.Tensor]:
                return [getattr(module, f"{kind}{number}") for number in range(module.num_gemms)]

            return _Linear([module], lambda: of("weight"), lambda: of("bias") if module.use_bias else [])

        first, second = linear(self.linear_fc1), linear(self.linear_fc2)
        return twin_of(self, _modules=self._modules | {"linear_fc1": first, "linear_fc2": second}), (first, second)


def own_products(experts: Any) -> str:
    """The name of the products of experts of Megatron-LM, as in `TITLES`."""
    return "te" if isinstance(experts, TEGroupedMLP) else "sequential"


def why_own_products(experts: Any) -> str:
    """Why experts of Megatron-LM, which can have replicas, cannot have other products; empty if they can."""
    config = experts.config
    for flag, why in {
        "fp8": "weights are multiplied in 8 bits",
        "fp4": "weights are multiplied in 4 bits",
        "use_transformer_engine_op_fuser": "Transformer Engine fuses products and activations",
        "delay_wgrad_compute": "weight gradients are computed apart",
        "cpu_offloading": "linear layers say what is offloaded",
    }.items():
        if getattr(config, flag, None):
            return f"{why} ({flag})"
    known = (MLP, ColumnParallelLinear, RowParallelLinear, torch.nn.ModuleList)
    for module in experts.modules():
        if module is experts:
            continue
        if not (type(module) in known or is_grouped_linear(module)) or "forward" in vars(module):
            return f"experts have a module of class {type(module).__name__}"
        if getattr(module, "gtp_remat_size", 1) > 1:
            return "ranks hold parts of weights (gtp_weight_remat_size)"
        if getattr(module, "te_quant_params", None) is not None:
            return "modules have precisions of their own (te_precision_config_file)"
    return ""


def choose_products(
    config: ExpertConfig, model: Any, job: Job, own: str, *, why_own: str, had: str | None
) -> GemmChoice:
    """The products that a run will have. All ranks of the job call it together.

    config: settings.
    model: config of the model.
    own, why_own, had: as in `choose_gemm`.

    Raises KernelError, a ValueError, if the products that `config` names do not run here.
    """
    device = torch.device("cpu") if is_cpu() else torch.device("cuda", torch.cuda.current_device())
    parts = mpu.get_expert_tensor_parallel_world_size()
    ways = model.tensor_model_parallel_size * model.context_parallel_size
    tokens = parts * job.micro_batch_size * job.seq_length // ways
    sizes = ExpertSizes(
        model.params_dtype,
        model.moe_latent_size or model.hidden_size,
        model.moe_ffn_hidden_size // parts,
        bool(model.gated_linear_unit),
        model.num_moe_experts // mpu.get_expert_model_parallel_world_size() + config.replica_slots,
        max(1, tokens * model.moe_router_topk),
    )
    return choose_gemm(device, sizes, own, config.gemm, why_own=why_own, had=had)

"""Gradual pruning in Megatron-LM's training step.

The matrices of the layers' linear modules are pruned; embedding, head, norms, biases and routers are not. Pruning a
weight sets its parameter, its float32 copy and its moments to zero. From then on its gradient is set to zero before the
optimizer steps, so the weight stays exactly zero. A mask is therefore not state: after a checkpoint is loaded, it
follows from the weights that are zero.
"""

import argparse
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import mpu
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.utils import unwrap_model

from balancing.report import event, imbalance
from examples.dynamic_models.config import DynamicsConfig
from examples.dynamic_models.schemes.pruning import cubic_sparsity, global_threshold, is_pruning_iteration
from examples.dynamic_models.schemes.sparse_linear import SparsePattern, sparse_linear
from megatron.balanced.shared.callbacks import StepCallback
from megatron.balanced.shared.optimizer_state import parts

__all__ = ["Pruning"]


class Pruning(StepCallback):
    """Pruning of the weights on each rank, at one global threshold."""

    def __init__(self, args: argparse.Namespace, config: DynamicsConfig) -> None:
        self.config, self._args = config, args
        self.masks: dict[torch.nn.Parameter, torch.Tensor] = {}  # True where a weight remains
        self._chunks: list[torch.nn.Module] = []
        self._schedule = {"start": config.prune_start, "end": config.prune_end, "interval": config.prune_interval}
        self._optimizer: Any = None

    def attach(self, chunks: list[torch.nn.Module]) -> None:
        """Remember the model chunks of this rank."""
        self._chunks = chunks

    def layers_moved(self) -> None:
        """Mask the present layers. Called again after layers have moved. Pruned weights are zero on any rank, so the
        masks of new layers follow from their weights."""
        if not self.masks:
            return
        before, self.masks = self.masks, {}
        for module in (module for _, module in self._linears()):
            if module.weight in before:
                self.masks[module.weight] = before[module.weight]
            else:
                self._set_mask(module, torch.ones_like(module.weight))

    def _linears(self) -> Iterator[tuple[int, torch.nn.Module]]:
        """The modules whose weights are pruned, with the number of their layer from 0."""
        for model in unwrap_model(self._chunks):
            for layer in model.decoder.layers:
                for module in layer.modules():
                    if isinstance(module, ColumnParallelLinear | RowParallelLinear):
                        yield layer.layer_number - 1, module

    def _unique_weights(self) -> Iterator[torch.Tensor]:
        """The weights that this rank counts, so that each replicated weight is counted once."""
        for _, module in self._linears():
            is_expert = not getattr(module.weight, "allreduce", True)
            first = mpu.get_expert_data_parallel_rank() if is_expert else _data_rank()
            if first == 0:
                yield module.weight

    def _add_up(self, counts: torch.Tensor) -> torch.Tensor:
        counts = counts.to(torch.cuda.current_device())
        dist.all_reduce(counts)
        return counts.cpu()

    # Around a step.

    def begin_step(self, iteration: int, config: Any) -> None:
        self._optimizer = self.run.optimizer
        final = self.config.prune_sparsity
        if not self.masks and cubic_sparsity(iteration - 1, final=final, **self._schedule) > 0:
            with torch.no_grad():
                self._set_masks(torch.ones_like(module.weight) for _, module in self._linears())  # resumed
        if is_pruning_iteration(iteration, **self._schedule):
            sparsity = cubic_sparsity(iteration, final=final, **self._schedule)
            if sparsity > 0:
                self._prune(iteration, sparsity)

    @torch.no_grad()
    def _prune(self, iteration: int, sparsity: float) -> None:
        for chunk in self._chunks:
            if getattr(chunk, "remove_forward_pre_hook_handles", None):  # weights are gathered only before their use
                chunk.start_param_sync(force_sync=True)
        weights = sum(weight.numel() for weight in self._unique_weights())
        total = int(self._add_up(torch.tensor([weights])))
        threshold = global_threshold(self._unique_weights, round(sparsity * total), self._add_up)
        self._set_masks(module.weight.abs().float() > threshold for _, module in self._linears())
        for parameter, mask in self.masks.items():
            parameter.masked_fill_(~mask, 0)
        for part in parts(self._optimizer):
            if part.parameter in self.masks:
                pruned = ~self.masks[part.parameter].view(-1)[part.start : part.stop]
                held = [part.main, *(part.state[name] for name in ("exp_avg", "exp_avg_sq") if name in part.state)]
                for tensor in held:
                    tensor.view(-1).masked_fill_(pruned, 0)
        self._report_densities(iteration, threshold)

    def _set_masks(self, left: Iterator[torch.Tensor]) -> None:
        """Set masks of the weights that remain and are not zero, and multiply as sparse matrices where that pays."""
        for (_, module), mask in zip(self._linears(), left, strict=True):
            self._set_mask(module, mask)

    def _set_mask(self, module: torch.nn.Module, left: torch.Tensor) -> None:
        weight = module.weight
        self.masks[weight] = left.bool() & (weight != 0)
        replaced = vars(module).get("_forward_impl")  # perhaps by what defers weight gradients
        if isinstance(replaced, partial) and replaced.func is _multiply:
            del module._forward_impl
        if self._multiplies_sparse(module):
            pattern = SparsePattern(self.masks[weight])
            if pattern.density <= self.config.prune_sparse_density:
                module._forward_impl = partial(_multiply, pattern)

    def _multiplies_sparse(self, module: torch.nn.Module) -> bool:
        alone = self._args.tensor_model_parallel_size == 1 and self._args.expert_tensor_parallel_size in (None, 1)
        return alone and module.weight.dtype in (torch.float32, torch.float64)

    def _report_densities(self, iteration: int, threshold: float) -> None:
        layers = self._args.num_layers
        counts = torch.zeros(2, layers, dtype=torch.int64)
        if _data_rank() == 0:
            for layer, module in self._linears():
                counts[0, layer] += int(self.masks[module.weight].sum())
                counts[1, layer] += module.weight.numel()
        left, whole = self._add_up(counts)
        if dist.get_rank() == dist.get_world_size() - 1:
            self.report(
                event(
                    iteration + 1,
                    "dynamics",
                    "layer",
                    imbalance_before=imbalance(left.numpy()),
                    action="prune",
                    reason="schedule",
                    scheme="pruning",
                    threshold=threshold,
                    density=[round(float(a) / max(int(b), 1), 6) for a, b in zip(left, whole, strict=True)],
                )
            )

    def end_schedule(self) -> None:
        """Set the gradients of pruned weights to zero."""
        for parameter, mask in self.masks.items():
            parameter.main_grad.masked_fill_(~mask, 0)

    def state_dict(self) -> None:
        """None: the schedule is a function of the iteration, and masks follow from the weights."""


def _data_rank() -> int:
    return mpu.get_data_parallel_rank(with_context_parallel=True)


def _multiply(
    pattern: SparsePattern, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, **unused: Any
) -> torch.Tensor:
    """Replaces Megatron's matrix product, whose other arguments concern tensor parallelism and fusion."""
    output = sparse_linear(input, weight, pattern)
    return output if bias is None else output + bias

"""CUDA graphs of layers (`--cuda-graph-impl transformer_engine`), captured again after each move.

A graph holds the addresses of weights and gradients. A move changes all of these addresses, even for layers that stay.
Megatron-LM's training loop captures once and keeps all graphs in one object.
"""

import functools
from typing import Any

import torch

from megatron.balanced.shared.callbacks import StepCallback

__all__ = ["RecapturedGraphs", "remembered"]


def remembered(original: Any) -> Any:
    """A subclass of `TECudaGraphHelper` whose object is an attribute of the first chunk, for `RecapturedGraphs`."""

    @functools.wraps(original, updated=())
    class Helper(original):
        def __init__(
            self,
            model: Any,
            config: Any,
            seq_length: int,
            micro_batch_size: int,
            optimizers: Any = (),
            pg_collection: Any = None,
        ) -> None:
            super().__init__(model, config, seq_length, micro_batch_size, optimizers, pg_collection)
            self.anew = functools.partial(
                original.__init__, self, model, config, seq_length, micro_batch_size, optimizers, pg_collection
            )
            model[0].graph_helper = self

    return Helper


class RecapturedGraphs(StepCallback):
    """Captures CUDA graphs again after a move, if there were graphs before. It must be the last callback, since a
    capture runs the layers in their final state."""

    def __init__(self) -> None:
        self._model: list[Any] = []

    def attach(self, chunks: list[torch.nn.Module]) -> None:
        self._model = chunks

    def layers_moved(self) -> None:
        helper = getattr(self._model[0], "graph_helper", None)
        if helper is None:  # before the first capture
            return
        finished = helper.capture_finished()
        if helper.graphs_created():
            helper.delete_cuda_graphs()
        helper.anew()
        if finished:
            self._capture(helper)

    def _capture(self, helper: Any) -> None:
        """Capture as Megatron-LM does: without the hooks that gather parameters, which run before a replay instead."""
        hooked = [
            ddp for ddp in self._model if ddp.ddp_config.overlap_param_gather and ddp.remove_forward_pre_hook_handles
        ]
        for ddp in hooked:
            ddp.disable_forward_pre_hook(param_sync=False)
        helper.create_cudagraphs()
        for ddp in hooked:
            ddp.enable_forward_pre_hook()
        if hooked:
            helper.cuda_graph_set_manual_hooks()

"""Megatron-LM's fine-grained offloading of activations on the CPU device.

Megatron-LM offloads what is on CUDA. Here it takes the tensors of the CPU device for such: they are copied to the pool
of the host and back by its own code. `offloaded` counts the copies.
"""

import os
from typing import Any

import torch

__all__ = ["install", "offloaded"]

offloaded: dict[str, int] = {"tensors": 0}


def install() -> None:
    """Have activations of this process be offloaded, for good. Transformer Engine must have been imported."""
    from megatron.core.pipeline_parallel import fine_grained_activation_offload as offload
    from megatron.core.pipeline_parallel import utils
    from transformer_engine.pytorch import cpu_offload

    os.environ["NVTE_CPU_OFFLOAD_V1"] = "1"  # which Transformer Engine reads when it is imported
    cpu_offload.NVTE_CPU_OFFLOAD_V1 = True
    utils.set_ideal_affinity_for_current_gpu = lambda: None  # it asks the driver
    handler = offload.ChunkOffloadHandler
    copy = handler.offload

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        offloaded["tensors"] += 1
        return copy(self, *args, **kwargs)

    handler.offload = counted
    handler._can_manage_tensor_for_offload = staticmethod(lambda tensor: not isinstance(tensor, torch.nn.Parameter))

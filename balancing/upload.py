"""Asynchronous upload of small tables to a GPU, through pinned memory.

A copy from ordinary memory makes the host wait for all earlier work of the GPU, and the GPU is then idle until the host
launches more. A copy from pinned memory is queued like a kernel. torch keeps the pinned memory until the copy is done.
"""

import numpy as np
import torch

__all__ = ["upload"]


def upload(table: np.ndarray | torch.Tensor, device: torch.device | None) -> torch.Tensor:
    """`table`, an array on the host, as a tensor on `device`. For None and for a CPU it stays on the host."""
    tensor = torch.as_tensor(table)
    if device is None or device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)

"""Asynchronous upload of small tables to a GPU, through pinned memory.

A copy from ordinary memory makes the host wait until the GPU has done everything it was given before, and the GPU is
then idle until it is given more. A copy from pinned memory is queued like any other work; torch keeps that memory until
the copy is done.
"""

import numpy as np
import torch

__all__ = ["upload"]


def upload(table: np.ndarray | torch.Tensor, device: torch.device | None) -> torch.Tensor:
    """`table`, which is on the host, as a tensor on `device`; it stays where it is for None and for a CPU."""
    tensor = torch.as_tensor(table)
    if device is None or device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)

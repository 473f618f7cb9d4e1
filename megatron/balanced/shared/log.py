"""Lines for the log of a job."""

import os

import torch.distributed as dist

__all__ = ["print_once"]


def print_once(line: str) -> None:
    """Print a line on rank 0 only, also before ranks are connected."""
    if (dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", 0))) == 0:
        print(line, flush=True)

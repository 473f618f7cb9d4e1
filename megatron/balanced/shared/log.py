"""Lines for the log of a job."""

import torch.distributed as dist

__all__ = ["print_once"]


def print_once(line: str) -> None:
    """Print a line on rank 0 only."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(line, flush=True)

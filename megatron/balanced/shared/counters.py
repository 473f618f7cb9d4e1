"""Counters of routers, kept exact.

Megatron-LM counts the tokens of each expert in buffers of the router. Expert bias and global aux losses follow these
counts. The cast of a model to bf16 or fp16 casts the buffers, too. bfloat16 has no odd numbers above 256, so small
micro-batches are not counted, and float16 ends at 65,504. The cast does not reach integers.
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from megatron.core.transformer.moe.router import TopKRouter

__all__ = ["keep_counters_exact", "with_exact_counters"]

# Sums over the micro-batches of a step. `qb_beta_accum` is a sum of logits, which Megatron-LM keeps in float32.
_COUNTERS = ("local_tokens_per_expert", "global_tokens_per_expert", "ga_steps")


def keep_counters_exact(modules: Iterable[torch.nn.Module]) -> None:
    """Turn the 16-bit counters of all routers in `modules` into int64. Call it between two steps, or before a router's
    first micro-batch, when the counters are zero."""
    for module in modules:
        for name in _COUNTERS if isinstance(module, TopKRouter) else ():
            counter = getattr(module, name, None)
            if counter is not None and counter.dtype in (torch.bfloat16, torch.float16):
                counter.data = counter.data.long()


def with_exact_counters(original: Callable) -> Callable:
    """Replaces the method of a router that returns its expert bias to float32 after a cast."""

    @functools.wraps(original)
    def _maintain_float32_expert_bias(self: Any) -> None:
        original(self)
        keep_counters_exact([self])

    return _maintain_float32_expert_bias

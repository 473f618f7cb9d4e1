"""Ranges of Megatron-LM's numeric flags.

Outside of them, version 0.19.2 divides by zero, indexes out of range or computes NaN, mostly during a step and on one
rank only.
"""

import argparse

from balancing.model_sizes import check_sizes
from megatron.balanced.shared.incompatible import shown

__all__ = ["check_ranges"]

_AT_LEAST_1 = (
    "check_weight_hash_across_dp_replicas_interval",
    "context_parallel_size",
    "distributed_timeout_minutes",
    "distributed_timeout_seconds_after_init",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "ffn_hidden_size",
    "kv_channels",
    "log_memory_interval",
    "make_vocab_size_divisible_by",
    "moe_ffn_hidden_size",
    "moe_router_topk",
    "num_distributed_optimizer_instances",
    "num_virtual_stages_per_pipeline_rank",
    "pipeline_model_parallel_size",
    "rotary_seq_len_interpolation_factor",
    "save_activations_interval",
    "save_dgrads_interval",
    "save_params_interval",
    "save_tokens_per_expert_interval",
    "save_wgrads_interval",
    "tensor_model_parallel_size",
    "vocab_size",
)


def check_ranges(args: argparse.Namespace) -> None:
    """Raise ValueError for a number out of range, and for sizes of no model. Called before Megatron-LM validates
    `args`."""
    for name in _AT_LEAST_1:
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ValueError(f"{shown(name, value)} must be at least 1")
    if args.rotary_base is not None and args.rotary_base <= 0:
        raise ValueError(f"--rotary-base {args.rotary_base} must be above 0, such as 10000")
    if args.window_size is not None and len(args.window_size) != 2:
        given = ",".join(map(str, args.window_size))
        raise ValueError(
            f"--window-size {given} must be the numbers of tokens before and after that a token attends to; use "
            f"{args.window_size[0]},0"
        )
    check_sizes(vars(args))

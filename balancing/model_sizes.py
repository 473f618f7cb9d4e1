"""Sizes of a model that cannot exist. Megatron-LM refuses some when it validates flags, and fails with others when it
builds the model or runs it. Forecasts, which know no Megatron-LM, and starts of runs refuse them here, in one line."""

from collections.abc import Mapping
from typing import Any

__all__ = ["check_sizes", "flag_of"]

# A size, what it must be a multiple of, and the argument that must be given, or not be given, for that.
_MULTIPLES = (
    ("hidden_size", "num_attention_heads", ("kv_channels", False)),
    ("num_attention_heads", "num_query_groups", ("group_query_attention", True)),
    ("num_attention_heads", "tensor_model_parallel_size", None),
    ("ffn_hidden_size", "tensor_model_parallel_size", None),
    ("moe_ffn_hidden_size", "expert_tensor_parallel_size", None),
)


def flag_of(name: str) -> str:
    """Megatron-LM's flag for an argument."""
    return "--" + name.replace("_", "-")


def check_sizes(given: Mapping[str, Any]) -> None:
    """Raise ValueError for sizes with which there is no model. given: Megatron-LM's arguments by name."""
    sizes = dict(given)
    if sizes.get("expert_tensor_parallel_size") is None:
        sizes["expert_tensor_parallel_size"] = sizes["tensor_model_parallel_size"]
    for size, unit, condition in _MULTIPLES:
        counts = condition is None or bool(sizes.get(condition[0])) is condition[1]
        value, by = sizes.get(size), sizes.get(unit)
        if counts and value and by and value % by:
            raise ValueError(f"{flag_of(size)} {value} must be a multiple of {flag_of(unit)} {by}")
    experts, topk = sizes.get("num_experts"), sizes["moe_router_topk"]
    if experts and topk > experts:
        raise ValueError(f"--moe-router-topk {topk} is above --num-experts {experts}; lower it")

"""Transformer Engine's fused routing and permutation of tokens, in torch.

`--moe-router-fusion` and `--moe-permute-fusion` call them. Each function has the name and the parameters of the one in
`transformer_engine.pytorch.permutation` or `.router` that it stands in for, and what it returns has the same layout, so
that a caller who takes it for Megatron-LM's own fails here as on a GPU. They keep float64, which Transformer Engine's
kernels do not, so that runs can be compared exactly. tests/transformer_engine/test_fused_moe.py compares them with
those kernels in Triton's interpreter.
"""

from typing import Any

import torch

from benchmarks.replaced import replace_name

__all__ = ["STAND_INS", "install_fused", "train_fused"]


def _row_id_map(routing_map: torch.Tensor) -> torch.Tensor:
    """int32 [token, 2 x experts + 1]: rows of a token after the permutation, from the last to the first, then their
    experts, then how many there are. -1 where there are fewer. The padding before an expert is not in its rows."""
    tokens, experts = routing_map.shape
    by_expert = routing_map.bool().T.contiguous()
    row = (by_expert.reshape(-1).cumsum(0) - 1).view(experts, tokens).T
    row = torch.where(routing_map.bool(), row, -1)
    rows, expert = row.sort(dim=1, descending=True, stable=True)
    expert = torch.where(rows >= 0, expert, -1)
    return torch.cat([rows, expert, (rows >= 0).sum(1, keepdim=True)], dim=1).int()


def _permute(
    inp: torch.Tensor,
    probs: torch.Tensor | None,
    routing_map: torch.Tensor,
    num_out_tokens: int,
    pad_offsets: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    assert routing_map.dtype in (torch.bool, torch.int32) and num_out_tokens > 0
    expert, token = routing_map.bool().T.nonzero(as_tuple=True)
    rows = torch.arange(len(token))
    if pad_offsets is not None:
        rows = rows + pad_offsets[expert]
    else:  # rows beyond the tokens would hold what was in memory before
        assert num_out_tokens == len(token), f"{num_out_tokens} rows for {len(token)} tokens"
    out = inp.new_zeros(num_out_tokens, inp.shape[1]).index_copy(0, rows, inp[token])
    permuted = None if probs is None else probs.new_zeros(num_out_tokens).index_copy(0, rows, probs[token, expert])
    return out, permuted, _row_id_map(routing_map)


def moe_permute(
    inp: torch.Tensor,
    routing_map: torch.Tensor,
    num_out_tokens: int,
    max_token_num: int = -1,
    map_type: str = "mask",
) -> tuple[torch.Tensor, torch.Tensor]:
    assert map_type == "mask"
    out, _, rows = _permute(inp, None, routing_map, num_out_tokens)
    return out, rows


def moe_permute_with_probs(
    inp: torch.Tensor, probs: torch.Tensor, routing_map: torch.Tensor, num_out_tokens: int
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    return _permute(inp, probs, routing_map, num_out_tokens)


def moe_permute_and_pad_with_probs(
    inp: torch.Tensor,
    probs: torch.Tensor,
    routing_map: torch.Tensor,
    tokens_per_expert: torch.Tensor,
    align_size: int,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor | None, torch.Tensor]:
    target = -(-tokens_per_expert // align_size) * align_size
    padding = (target - tokens_per_expert).cumsum(0)
    offsets = None if torch.equal(target, tokens_per_expert) else torch.cat([padding.new_zeros(1), padding[:-1]])
    out, permuted, rows = _permute(inp, probs, routing_map, int(target.sum()), offsets)
    return out, permuted, rows, offsets, target


def moe_unpermute(
    inp: torch.Tensor,
    row_id_map: torch.Tensor,
    merging_probs: torch.Tensor | None = None,
    restore_shape: torch.Size | None = None,
    map_type: str = "mask",
    probs: torch.Tensor | None = None,
    pad_offsets: torch.Tensor | None = None,
) -> torch.Tensor:
    assert map_type == "mask" and merging_probs is None and probs is None and restore_shape is not None
    experts = row_id_map.shape[1] // 2
    out = inp.new_zeros(restore_shape)
    for rows, expert in zip(row_id_map[:, :experts].T.long(), row_id_map[:, experts:-1].T.long(), strict=True):
        (token,) = (rows >= 0).nonzero(as_tuple=True)
        source = rows[token]
        if pad_offsets is not None:
            source = source + pad_offsets[expert[token]]
        out = out.index_add(0, token, inp[source])
    return out


def moe_sort_chunks_by_index(inp: torch.Tensor, split_sizes: torch.Tensor, sorted_index: torch.Tensor) -> torch.Tensor:
    chunks = inp.split(split_sizes.tolist())
    return torch.cat([chunks[index] for index in sorted_index.tolist()])


def moe_sort_chunks_by_index_with_probs(
    inp: torch.Tensor, probs: torch.Tensor, split_sizes: torch.Tensor, sorted_index: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return tuple(moe_sort_chunks_by_index(part, split_sizes, sorted_index) for part in (inp, probs))


def fused_topk_with_score_function(
    logits: torch.Tensor,
    topk: int,
    use_pre_softmax: bool,
    num_groups: int | None,
    group_topk: int | None,
    scaling_factor: float | None,
    score_function: str,
    expert_bias: torch.Tensor | None,
    routing_map_format: Any = "bytemap",
    topk_indices: torch.Tensor | None = None,
    qb_histogram: torch.Tensor | None = None,
    qb_bin_bounds: torch.Tensor | None = None,
    qb_histogram_mode: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function

    assert expert_bias is None or score_function in ("sigmoid", "sqrtsoftplus")
    return topk_routing_with_score_function(
        logits, topk, use_pre_softmax, num_groups, group_topk, scaling_factor, score_function, expert_bias
    )


def fused_compute_score_for_moe_aux_loss(
    logits: torch.Tensor, topk: int, score_function: str, routing_map_format: Any = "bytemap"
) -> tuple[torch.Tensor, torch.Tensor]:
    from megatron.core.transformer.moe.moe_utils import compute_routing_scores_for_aux_loss

    return compute_routing_scores_for_aux_loss(logits, topk, score_function)


def fused_moe_aux_loss(
    probs: torch.Tensor, tokens_per_expert: torch.Tensor, total_num_tokens: int, num_experts: int, topk: int,
    coeff: float,
) -> torch.Tensor:  # fmt: skip
    from megatron.core.transformer.moe.moe_utils import switch_load_balancing_loss_func

    return switch_load_balancing_loss_func(probs, tokens_per_expert, total_num_tokens, topk, num_experts, coeff)


# Names in Megatron-LM's moe_utils.
STAND_INS = {
    "fused_permute": moe_permute,
    "fused_permute_with_probs": moe_permute_with_probs,
    "fused_permute_and_pad_with_probs": moe_permute_and_pad_with_probs,
    "fused_unpermute": moe_unpermute,
    "fused_sort_chunks_by_index": moe_sort_chunks_by_index,
    "fused_sort_chunks_by_index_with_probs": moe_sort_chunks_by_index_with_probs,
    "fused_topk_with_score_function": fused_topk_with_score_function,
    "fused_compute_score_for_moe_aux_loss": fused_compute_score_for_moe_aux_loss,
    "fused_moe_aux_loss": fused_moe_aux_loss,
}


def install_fused() -> dict[str, int]:
    """Have Megatron-LM find the stand-ins in this process, for good. Returns how often each was called."""
    from megatron.core.transformer.moe import moe_utils

    calls = dict.fromkeys(STAND_INS, 0)

    def counted(name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            return STAND_INS[name](*args, **kwargs)

        return call

    for name in STAND_INS:
        replace_name(moe_utils, name, counted(name))
    moe_utils.HAVE_TE = True
    moe_utils.is_te_min_version = lambda version, check_equality=True: True
    return calls


def train_fused(argv: list[str], keep_parameters: bool) -> Any:
    """As `tests.support.training.train_rank`, with the stand-ins. Fails if none was called."""
    from tests.support.training import train_rank

    calls = install_fused()
    run = train_rank(argv, keep_parameters)
    # HybridEP and NCCL EP permute by themselves.
    permutes = "--moe-permute-fusion" in argv and not {"hybridep", "ncclep"} & set(argv)
    assert calls["fused_unpermute"] or not permutes, calls
    assert calls["fused_topk_with_score_function"] or "--moe-router-fusion" not in argv, calls
    return run

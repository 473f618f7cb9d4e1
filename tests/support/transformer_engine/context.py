"""What Transformer Engine's own context parallelism calls on packed documents (THD): fused attention, and the kernels
that cut documents into halves and merge partial results. Matrix products and indices in the place of cuDNN's kernels.

`cu_seqlens` are bounds of documents, as many as documents and one. Where a document has padding behind it, the bounds
of its room are given beside those of its tokens.
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch

from tests.support.transformer_engine.cpp_module import MODULE, stands_in

__all__ = ["have_fused_attention"]


def have_fused_attention() -> None:
    """From now on in this process Transformer Engine finds a backend for fused attention, as on a GPU with cuDNN, and
    its context parallelism waits for a message as often as it likes."""
    MODULE.get_fused_attn_backend = lambda *unused: (MODULE.NVTE_Fused_Attn_Backend.NVTE_F16_arbitrary_seqlen, "")
    from transformer_engine.pytorch.attention.dot_product_attention import context_parallel

    communicate = context_parallel.flash_attn_p2p_communicate
    context_parallel.flash_attn_p2p_communicate = lambda *given: [_Once(work) for work in communicate(*given)]


class _Once:
    """A message. NCCL's may be waited for twice, as Transformer Engine does; gloo's second wait would not end."""

    def __init__(self, work: Any) -> None:
        self._work = work

    def wait(self) -> None:
        if self._work is not None:
            self._work.wait()
        self._work = None


def _rows(bounds: torch.Tensor, rooms: torch.Tensor) -> list[slice]:
    """The rows of each document's tokens."""
    starts, counts = rooms.tolist()[:-1], [stop - start for start, stop in pairwise(bounds.tolist())]
    return [slice(start, start + count) for start, count in zip(starts, counts, strict=True)]


def _pieces(given: dict[str, Any]) -> Iterator[tuple[slice, slice, torch.Tensor]]:
    """Rows of queries, rows of keys, and which keys each query does not see, bool [queries, keys]."""
    masks = MODULE.NVTE_Mask_Type
    mask, bottom_right, (before, after) = given["mask"], given["bottom_right"], given["window"]
    assert after in (-1, 0) and given["dropout"] == 0
    bounds = [given[name] for name in ("bounds_q", "bounds_k", "rooms_q", "rooms_k")]
    for bound in bounds:
        assert bound.dtype is torch.int32 and bound.is_contiguous() and len(bound) == len(bounds[0])
    causal = mask in (masks.NVTE_PADDING_CAUSAL_MASK, masks.NVTE_PADDING_CAUSAL_BOTTOM_RIGHT_MASK)
    assert causal or (mask == masks.NVTE_PADDING_MASK and before == -1)
    for rows, keys in zip(_rows(bounds[0], bounds[2]), _rows(bounds[1], bounds[3]), strict=True):
        queries, seen = rows.stop - rows.start, keys.stop - keys.start
        assert queries <= given["longest"][0] and seen <= given["longest"][1]
        hidden = torch.zeros(queries, seen, dtype=torch.bool)
        shift = seen - queries if bottom_right else 0
        if causal:
            hidden = ~hidden.logical_not().tril(shift)
        if before >= 0:
            hidden |= hidden.new_ones(queries, seen).tril(shift - before - 1)
        if queries:
            yield rows, keys, hidden


def _check(layout: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *more: torch.Tensor) -> torch.dtype:
    """That tensors lie in memory as the layout says, of which cuDNN knows no more than addresses. Returns the type in
    which sums are made."""
    layouts, (heads, size) = MODULE.NVTE_QKV_Layout, k.shape[1:]
    assert all(x.is_contiguous() for x in (q, *more)) and q.shape[2] == size
    if layout == layouts.NVTE_THD_TH2D:
        assert k.shape == v.shape and k.stride() == v.stride() == (2 * heads * size, 2 * size, 1)
        assert v.data_ptr() == k.data_ptr() + size * k.element_size()
    else:
        assert layout == layouts.NVTE_THD_THD_THD and k.is_contiguous() and v.is_contiguous()
    return torch.float64 if q.dtype is torch.float64 else torch.float32


def _scores(q: torch.Tensor, k: torch.Tensor, hidden: torch.Tensor, scale: float) -> torch.Tensor:
    """[heads, queries, keys]; k has the heads of q."""
    return (torch.einsum("qhd,khd->hqk", q, k) * scale).masked_fill(hidden, -torch.inf)


@stands_in
def fused_attn_fwd(*given: Any) -> list[torch.Tensor]:
    """Output, logsumexp [tokens, heads, 1] and the state of a generator that draws nothing."""
    longest, (scale, dropout), layout, mask, window = given[:2], given[3:5], given[6], given[10], given[12]
    bottom_right, bounds, (q, k, v), rooms = given[13], given[14:16], given[16:19], given[20:22]
    pieces = _pieces(
        {
            "longest": longest, "dropout": dropout, "layout": layout, "mask": mask, "window": window,
            "bottom_right": bottom_right, "bounds_q": bounds[0], "bounds_k": bounds[1], "rooms_q": rooms[0],
            "rooms_k": rooms[1],
        }
    )  # fmt: skip
    torch.rand(1, generator=given[28])  # as on a GPU, where the generator advances without dropout, too
    dtype = _check(layout, q, k, v)
    out, logsumexp = torch.zeros(*q.shape[:2], v.shape[2], dtype=q.dtype), torch.zeros(*q.shape[:2], 1, dtype=dtype)
    share = q.shape[1] // k.shape[1]
    for rows, keys, hidden in pieces:
        wide_k, wide_v = (x[keys].to(dtype).repeat_interleave(share, 1) for x in (k, v))
        scores = _scores(q[rows].to(dtype), wide_k, hidden, scale)
        logsumexp[rows] = scores.logsumexp(-1).t()[..., None]
        out[rows] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), wide_v).to(q.dtype)
    return [out, logsumexp, torch.zeros(2, dtype=torch.int64)]


@stands_in
def fused_attn_bwd(*given: Any) -> list[torch.Tensor | None]:
    longest, (scale, dropout), layout, mask, window = given[:2], given[2:4], given[5], given[12], given[14]
    bottom_right, bounds, (q, k, v, out, grad), saved, rooms = (
        given[15], given[17:19], given[19:24], given[25], given[26:28],
    )  # fmt: skip
    pieces = _pieces(
        {
            "longest": longest, "dropout": dropout, "layout": layout, "mask": mask, "window": window,
            "bottom_right": bottom_right, "bounds_q": bounds[0], "bounds_k": bounds[1], "rooms_q": rooms[0],
            "rooms_k": rooms[1],
        }
    )  # fmt: skip
    logsumexp = saved[0]
    dtype = _check(layout, q, k, v, out, grad, logsumexp)
    assert logsumexp.shape == (*q.shape[:2], 1) and logsumexp.dtype is dtype and given[8] == layout
    dq, dk, dv = (torch.zeros(x.shape, dtype=x.dtype) for x in (q, k, v))
    if layout == MODULE.NVTE_QKV_Layout.NVTE_THD_TH2D:  # gradients lie beside each other as keys and values do
        dk, dv = torch.zeros(*k.shape[:2], 2, k.shape[2], dtype=k.dtype).unbind(2)
    share = q.shape[1] // k.shape[1]
    for rows, keys, hidden in pieces:
        own, own_grad = q[rows].to(dtype), grad[rows].to(dtype)
        wide_k, wide_v = (x[keys].to(dtype).repeat_interleave(share, 1) for x in (k, v))
        weights = (_scores(own, wide_k, hidden, scale) - logsumexp[rows, :, 0].t()[..., None]).exp()
        correction = (own_grad * out[rows].to(dtype)).sum(-1).t()[..., None]
        of_scores = weights * (torch.einsum("qhd,khd->hqk", own_grad, wide_v) - correction) * scale
        dq[rows] = torch.einsum("hqk,khd->qhd", of_scores, wide_k).to(q.dtype)
        for whole, part in ((dk, torch.einsum("hqk,qhd->khd", of_scores, own)),
                            (dv, torch.einsum("hqk,qhd->khd", weights, own_grad))):  # fmt: skip
            whole[keys] = part.unflatten(1, (-1, share)).sum(2).to(whole.dtype)
    return [dq, dk, dv, None, None]


def _halves(bounds: torch.Tensor, half: int) -> torch.Tensor:
    """Rows of the first or second half of each document."""
    middles = [(start + stop) // 2 for start, stop in pairwise(bounds.tolist())]
    pairs = zip(middles, pairwise(bounds.tolist()), strict=True)
    return torch.cat([torch.arange(*((middle, stop) if half else (start, middle))) for middle, (start, stop) in pairs])


@stands_in
def thd_read_half_tensor(tensor: torch.Tensor, cu_seqlens: torch.Tensor, half_idx: int) -> torch.Tensor:
    return tensor[_halves(cu_seqlens, half_idx)]


@stands_in
def thd_read_second_half_lse(
    lse: torch.Tensor, cu_seqlens: torch.Tensor, lse_packed: bool, second_half_lse_seqlen: int
) -> torch.Tensor:
    """lse: [heads, tokens]."""
    assert lse_packed
    return lse[:, _halves(cu_seqlens, 1)].contiguous()


@stands_in
def thd_second_half_lse_correction(
    lse: torch.Tensor, lse_per_step: torch.Tensor, cu_seqlens: torch.Tensor, lse_packed: bool
) -> None:
    assert lse_packed
    rows = _halves(cu_seqlens, 1)
    lse[:, rows] = torch.logaddexp(lse[:, rows], lse_per_step)


@stands_in
def thd_out_correction(
    out: torch.Tensor,
    out_per_step: torch.Tensor,
    old_lse: torch.Tensor,
    lse: torch.Tensor,
    lse_per_step: torch.Tensor,
    cu_seqlens: torch.Tensor,
    only_second_half: bool,
    lse_packed: bool,
) -> None:
    """out becomes the weighted mean of itself and of the step's output, by their shares of the sum of exponentials."""
    assert lse_packed
    rows = _halves(cu_seqlens, 1) if only_second_half else torch.arange(len(out))
    kept, more = (old_lse[:, rows] - lse[:, rows]).exp(), (lse_per_step - lse[:, rows]).exp()
    new = out[rows].float() * kept.t()[..., None] + out_per_step.float() * more.t()[..., None]
    out[rows] = new.to(out.dtype)


@stands_in
def thd_grad_correction(
    grad: torch.Tensor, grad_per_step: torch.Tensor, cu_seqlens: torch.Tensor, first_half: str, second_half: str
) -> None:
    """first_half, second_half: what is done to that half of each document: "add", "copy", "zero" or "none". Where one
    half has nothing to take, the step's gradient has the other half alone."""
    whole = {first_half, second_half} <= {"add", "copy"}
    for half, what in enumerate((first_half, second_half)):
        rows = _halves(cu_seqlens, half)
        if what == "zero":
            grad[rows] = 0
        elif what != "none":
            part = grad_per_step[rows] if whole else grad_per_step
            grad[rows] = grad[rows] + part if what == "add" else part


@stands_in
def thd_get_partitioned_indices(
    cu_seqlens: torch.Tensor, total_tokens: int, world_size: int, rank: int
) -> torch.Tensor:
    """The tokens of a rank: of each document's 2 x world_size chunks the one of its number, and the same from the
    end."""
    found = []
    for start, stop in pairwise(cu_seqlens.tolist()):
        assert (stop - start) % (2 * world_size) == 0
        chunks = torch.arange(start, stop).tensor_split(2 * world_size)  # a document may be empty
        found += [chunks[rank], chunks[2 * world_size - 1 - rank]]
    indices = torch.cat(found).int()
    assert len(indices) == total_tokens // world_size
    return indices


def _of_all_ranks(cu_seqlens: torch.Tensor, world_size: int, tokens: int) -> torch.Tensor:
    parts = [thd_get_partitioned_indices(cu_seqlens, tokens, world_size, rank) for rank in range(world_size)]
    return torch.cat(parts).long()


@stands_in
def thd_sequence_order_to_cp_rank_order(
    tensor: torch.Tensor, cu_seqlens: torch.Tensor, world_size: int, total_tokens: int
) -> torch.Tensor:
    return tensor[_of_all_ranks(cu_seqlens, world_size, total_tokens)]


@stands_in
def thd_cp_rank_order_to_sequence_order(
    tensor: torch.Tensor, cu_seqlens: torch.Tensor, world_size: int, total_tokens: int
) -> torch.Tensor:
    found = torch.empty_like(tensor)
    found[_of_all_ranks(cu_seqlens, world_size, total_tokens)] = tensor
    return found


@stands_in
def thd_copy_valid_tokens_from_per_split_to_rank_local(
    rank_local: torch.Tensor, per_split: torch.Tensor, cu_seqlens_padded: torch.Tensor, cu_seqlens: torch.Tensor
) -> None:
    for rows in _rows(cu_seqlens, cu_seqlens_padded):
        rank_local[rows] = per_split[rows]

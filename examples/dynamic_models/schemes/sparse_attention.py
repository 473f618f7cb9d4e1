"""Dynamic sparse attention: blocks of queries attend to a few blocks of keys, chosen by the data.

The blocks differ between heads, sequences, layers and steps. They are chosen by the scores of the blocks' means, or by
locality-sensitive hashing, similar to sparse causal flash attention (arXiv 2306.01160): queries and keys are hashed to
buckets, and a block of queries attends to the blocks of keys with which it shares the most. Attention is causal; a
block of queries always attends to itself and to the first block. Other blocks are not computed.
"""

import math
from functools import cache

import torch

__all__ = ["block_sparse_attention", "choose_blocks", "hash_scores", "mean_scores"]

_BUCKETS = 16


def mean_scores(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Scores of pairs of blocks: queries and keys [..., blocks, block, d] -> [..., query blocks, key blocks]."""
    return queries.mean(-2) @ keys.mean(-2).transpose(-1, -2)


def hash_scores(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Numbers of pairs of a query and a key that share a bucket, for each pair of blocks; shapes as in `mean_scores`.

    The bucket of a vector is the closest of `_BUCKETS` fixed random directions.
    """
    directions = _directions(queries.shape[-1], queries.device, queries.dtype)

    def histogram(vectors: torch.Tensor) -> torch.Tensor:
        bucket = (vectors @ directions).argmax(-1)
        return torch.nn.functional.one_hot(bucket, _BUCKETS).sum(-2).to(torch.float32)

    return histogram(queries) @ histogram(keys).transpose(-1, -2)


@cache  # saves a copy to the device in every layer, for which the host would wait
def _directions(size: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    random = torch.randn(size, _BUCKETS // 2, generator=torch.Generator().manual_seed(size), dtype=torch.float32)
    return torch.cat([random, -random], dim=1).to(device, dtype)


def choose_blocks(scores: torch.Tensor, keep: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The blocks of keys that each block of queries attends to.

    scores [..., blocks, blocks] -> `index` [..., blocks, kept] and `real`, bool: False where a block of queries has
    fewer blocks before it than are kept. Its own block and block 0 are always chosen first.
    """
    blocks = scores.shape[-1]
    own = torch.arange(blocks, device=scores.device)
    future = own[None, :] > own[:, None]
    scores = scores.masked_fill(future, -math.inf)
    scores = scores.masked_fill((own == 0)[None, :], torch.finfo(scores.dtype).max / 2)
    scores = scores.masked_fill(own[None, :] == own[:, None], math.inf)
    best = scores.topk(min(keep, blocks), dim=-1)
    return best.indices, best.values > -math.inf


def block_sparse_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    block: int,
    keep: int,
    method: str = "blocks",
    scale: float | None = None,
    dropout: torch.nn.Module | None = None,
) -> torch.Tensor:
    """Causal attention of [b, heads, s, d] tensors, each block of queries to `keep` blocks of keys -> [b, heads, s, d].

    block: tokens in a block; s need not be a multiple of it.
    keep: blocks of keys for each block of queries; with at least as many as there are, this is full causal attention.
    method: "blocks" or "hash".
    scale: of the scores, 1 / sqrt(d) by default.
    dropout: applied to the attention weights.

    Work and memory grow with s x keep x block instead of s x s.
    """
    batch, heads, length, size = query.shape
    pad = -length % block
    blocks = (length + pad) // block

    def cut(tensor: torch.Tensor) -> torch.Tensor:
        padded = torch.nn.functional.pad(tensor, (0, 0, 0, pad)) if pad else tensor
        return padded.reshape(batch, heads, blocks, block, tensor.shape[-1])

    query, key, value = cut(query), cut(key), cut(value)
    with torch.no_grad():
        scores = {"blocks": mean_scores, "hash": hash_scores}[method](query.detach(), key.detach())
        index, real = choose_blocks(scores.float(), keep)
    kept = index.shape[-1]

    def chosen(tensor: torch.Tensor) -> torch.Tensor:
        width = tensor.shape[-1]
        rows = tensor.reshape(batch * heads, blocks, block * width)
        flat = index.reshape(batch * heads, blocks * kept, 1).expand(-1, -1, block * width)
        return rows.gather(1, flat).reshape(batch, heads, blocks, kept * block, width)

    logits = query @ chosen(key).transpose(-1, -2) * (1 / math.sqrt(size) if scale is None else scale)
    within = torch.arange(block, device=query.device)
    positions = (index[..., None] * block + within).flatten(-2)  # of keys
    queries = torch.arange(blocks * block, device=query.device).reshape(blocks, block)
    seen = (positions[..., None, :] <= queries[:, :, None]) & real.repeat_interleave(block, -1)[..., None, :]
    weights = logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits
    weights = weights.masked_fill(~seen, -math.inf).softmax(-1).to(value.dtype)
    if dropout is not None:
        weights = dropout(weights)
    output = weights @ chosen(value)
    return output.reshape(batch, heads, blocks * block, -1)[:, :, :length]

"""Attention over documents whose tokens are spread over ranks, in slow, plain PyTorch. The first file to read of this
folder, and the oracle of its tests.

Zeppelin (section 3) and the planners here cut a document into shards, so that all ranks have the same attention to
compute. A rank then has some queries of a document, and the keys that they see are on other ranks. It gathers these
keys shard by shard. What one shard gives is a part of the answer: of each query the largest score, the sum of the
exponentials below it, and the values weighted by them. Parts are merged by scaling both to a common largest score, so
that their order changes nothing but rounding. Autograd makes the gradients.

The engine computes the same: `balancing/kernels` gives parts (as output and log-sum-exp) and merges them.
"""

import torch

from balancing.sequences.sequence_plan import SequencePlan, Shard

__all__ = ["attention"]


def attention(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    plan: SequencePlan,
    *,
    scale: float,
    window: int | None = None,
    sink: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention of each document: [token, head, value size].

    queries: [token, head, size]; keys, values: [token, key head, size]. Documents lie behind one another.
    plan: where the tokens are. The result does not depend on it, but for rounding.
    scale: factor of the scores.
    window: how many keys before itself a query sees; None for all.
    sink: [head], the score of a key without a value that every query sees.
    """
    groups = queries.shape[1] // keys.shape[1]  # query heads that share a key head
    keys, values = keys.repeat_interleave(groups, 1), values.repeat_interleave(groups, 1)
    first = [sum(plan.lengths[:document]) for document in range(len(plan.lengths))]
    out = torch.zeros(*queries.shape[:2], values.shape[2], dtype=queries.dtype)
    for mine in plan.attention:  # queries of one document on the rank `mine.rank`
        own = _rows(mine, first)
        part = _nothing(queries[own], values, sink)
        for other in plan.attention:  # keys that this rank gathers from `other.rank`
            if other.sequence == mine.sequence and other.start < mine.stop:
                gathered = _rows(other, first)
                apart = torch.arange(mine.start, mine.stop)[:, None] - torch.arange(other.start, other.stop)
                seen = (apart >= 0) & (apart <= (max(plan.lengths) if window is None else window))
                scores = torch.einsum("qhd,khd->hqk", queries[own], keys[gathered]) * scale
                part = _merge(part, scores.masked_fill(~seen, float("-inf")), values[gathered])
        _, total, weighted = part
        out[own] = (weighted / total[..., None]).transpose(0, 1)
    return out


def _rows(shard: Shard, first: list[int]) -> slice:
    return slice(first[shard.sequence] + shard.start, first[shard.sequence] + shard.stop)


Part = tuple[torch.Tensor, ...]  # largest score and sum, [head, query], and weighted values, [head, query, size]


def _nothing(queries: torch.Tensor, values: torch.Tensor, sink: torch.Tensor | None) -> Part:
    """Before any key has been seen; a sink has a score and no value."""
    tokens, heads, _ = queries.shape
    largest = queries.new_full((heads, tokens), torch.finfo(queries.dtype).min)
    total = torch.zeros_like(largest)
    if sink is not None:
        largest, total = sink.detach()[:, None].expand(-1, tokens), (sink - sink.detach()).exp()[:, None] + total
    return largest, total, queries.new_zeros(heads, tokens, values.shape[2])


def _merge(part: Part, scores: torch.Tensor, values: torch.Tensor) -> Part:
    """The part with some more keys. scores: [head, query, key], -inf where a query does not see a key."""
    before, total, weighted = part
    largest = torch.maximum(before, scores.detach().amax(-1))
    kept, new = (before - largest).exp(), (scores - largest[..., None]).exp()
    values = torch.einsum("hqk,khd->hqd", new, values)
    return largest, total * kept + new.sum(-1), weighted * kept[..., None] + values

"""A sequence cut over the ranks of a ring so that each has the same area: rank i of G holds pieces i and 2G - 1 - i.

Megatron-LM and Transformer Engine cut this way after padding to a multiple of 2G. Nothing is padded here: pieces differ
by a token where the length does not divide.
"""

from collections.abc import Sequence

from balancing.sequences.sequence_plan import Shard

__all__ = ["even_counts", "token_quotas", "zigzag"]


def token_quotas(tokens: int, ranks: int) -> list[int]:
    """Tokens of each rank: the mean, with one more on the first ranks where `tokens` do not divide."""
    return even_counts(tokens, ranks, 0)


def even_counts(tokens: int, ranks: int, first: int) -> list[int]:
    """Tokens of each rank; the remainder goes to rank `first` and the ranks after it, one each, cyclically."""
    base, more = divmod(tokens, ranks)
    return [base + ((rank - first) % ranks < more) for rank in range(ranks)]


def zigzag(sequence: int, ranks: Sequence[int], counts: Sequence[int]) -> list[Shard]:
    """Shards of one sequence, by position: counts[i] tokens on ranks[i], half of them in either half of the zig-zag."""
    shards: list[Shard] = []
    start = 0
    fronts = [(rank, count // 2) for rank, count in zip(ranks, counts, strict=True)]
    backs = [(rank, count - count // 2) for rank, count in zip(ranks, counts, strict=True)]
    for rank, count in fronts + backs[::-1]:
        if not count:
            continue
        if shards and shards[-1].rank == rank:  # the two pieces of the last rank meet
            shards[-1] = shards[-1]._replace(stop=start + count)
        else:
            shards.append(Shard(sequence, start, start + count, rank))
        start += count
    return shards

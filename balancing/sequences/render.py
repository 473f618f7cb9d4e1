"""A plan of sequences as text: what each rank holds in attention, and how much it holds in linear layers."""

from balancing.sequences.sequence_plan import SequencePlan, Shard

__all__ = ["render"]

_MOST = 6  # shards shown of a rank


def render(plan: SequencePlan) -> str:
    """One line a rank: tokens, area over the mean, and its shards as sequence[start:stop].

    ~ marks a sequence on a ring, < one whose keys are gathered. The text ends without a line break.
    """
    mean = max(float(plan.area.mean()), 1.0)
    tokens, area = int(plan.tokens.max()) * plan.ranks / sum(plan.lengths), float(plan.area.max()) / mean
    lines = [
        f"{plan.method}: {len(plan.lengths)} sequences, {sum(plan.lengths)} tokens on {plan.ranks} ranks; fullest over "
        f"mean: tokens {tokens:.3f}, area {area:.3f}" + ("; tokens are remapped for linear layers" * plan.remapped)
    ]
    for rank in range(plan.ranks):
        own = plan.shards(rank)
        held = " ".join(_shard(plan, shard) for shard in own[:_MOST])
        more = f" and {len(own) - _MOST} more" if len(own) > _MOST else ""
        remapped = f" -> {plan.linear_tokens[rank]}" if plan.remapped else ""
        lines.append(
            f"rank {rank:4d}  {plan.tokens[rank]:7d}{remapped} tokens  area {plan.area[rank] / mean:5.3f}  {held}{more}"
        )
    return "\n".join(line.rstrip() for line in lines)


def _shard(plan: SequencePlan, shard: Shard) -> str:
    mark = {"local": "", "ring": "~", "gather": "<"}[plan.exchange[shard.sequence]]
    return f"{mark}{shard.sequence}[{shard.start}:{shard.stop}]"

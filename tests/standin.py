"""Until planner and engine are there."""
from typing import Any
import random
import torch
import torch.distributed as dist
from training import RankRun, train_rank
from balancing.sequences.layout import SequencePlan, Shard


def plan_sequences(lengths, cluster, *, shape, method="auto", token_capacity=None, chunk=None):
    ranks, total = cluster.world_size, sum(lengths)
    def layout(order):
        quota = [total // ranks + (r < total % ranks) for r in range(ranks)]
        shards, r = [], 0
        for seq in order:
            start, n = 0, lengths[seq]
            while start < n:
                while not quota[r]: r += 1
                take = min(quota[r], n - start, 5)
                quota[r] -= take
                shards.append(Shard(seq, start, start + take, r))
                start += take
        return tuple(shards)
    order = list(range(len(lengths)))
    random.Random(total).shuffle(order)
    lin = layout(order)
    return SequencePlan(tuple(lengths), ranks, "standin", lin, lin, ("gather",) * len(lengths), None)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group, rank):
        ctx.group, ctx.rank = group, rank
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, x, group=group)
        return torch.stack(parts)

    @staticmethod
    def backward(ctx, g):
        g = g.contiguous()
        dist.all_reduce(g, group=ctx.group)
        return g[ctx.rank], None, None


class SequenceAttention:
    def __init__(self, plan, *, rank, group, cluster, routing="off"):
        self.plan, self.rank, self.group = plan, rank, group

    def __call__(self, q, k, v, *, softmax_scale):
        plan = self.plan
        most = int(plan.linear_tokens.max())
        first = [sum(plan.lengths[:i]) for i in range(len(plan.lengths))]
        index = [torch.cat([torch.arange(first[s.sequence] + s.start, first[s.sequence] + s.stop) for s in plan.shards(r, linear=True)]) for r in range(plan.ranks)]
        def whole(x):
            x = torch.cat([x, x.new_zeros(most - len(x), *x.shape[1:])])
            parts = _Gather.apply(x.contiguous(), self.group, self.rank).unbind(0)
            out = torch.cat([p[:len(i)] for p, i in zip(parts, index)])
            return out[torch.argsort(torch.cat(index))]
        q, k, v = whole(q), whole(k), whole(v)
        rep = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(rep, 1), v.repeat_interleave(rep, 1)
        outs = []
        for f, n in zip(first, plan.lengths):
            a = [x[f:f + n].transpose(0, 1) for x in (q, k, v)]
            outs.append(torch.nn.functional.scaled_dot_product_attention(*a, is_causal=True, scale=softmax_scale).transpose(0, 1))
        return torch.cat(outs)[index[self.rank]]


def standin_rank(argv) -> RankRun:
    from balancing import sequences
    sequences.plan_sequences, sequences.SequenceAttention = plan_sequences, SequenceAttention
    return train_rank(argv, True)

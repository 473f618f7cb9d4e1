"""Attention on packed documents by a plan of ours and by Transformer Engine's own context parallelism, on the same
ranks: both against one rank that has the whole batch, and how long each takes.

Transformer Engine gives every rank two chunks of every document (`cp_comm_type`: keys and values go round a ring, are
gathered, heads are exchanged for tokens, or that within pairs of ranks and the ring between them). It runs on the CPU
device over stand-ins for its kernels and for cuDNN's.
"""

import time
from collections.abc import Callable
from typing import Any

from tests.gpu.trial import Trial

RANKS = 4
# (lengths of documents, query heads, key-value heads, size of a head)
BATCHES = {
    "cuda": ((32768, 8192, 8192, 4096, 4096, *(1024,) * 8), 32, 8, 128),
    "cpu": ((512, 128, 128, 64, *(16,) * 4), 8, 4, 16),
}
WAYS = ("p2p", "all_gather", "a2a", "a2a+p2p")
TOLERANCE = 2e-2  # relative, in norm, of results in bf16 that are merged from several parts
ROUNDS = 3  # timed


def _attend(device: str) -> tuple[dict[str, tuple[float, float]], dict[str, str]]:
    """({way: (largest error, milliseconds of a layer forward and backward)}, {way: why it does not apply}). The error
    is that of output and gradients on this rank. On the CPU no time is told."""
    import torch
    import torch.distributed as dist

    from balancing.kernels.base import Pieces
    from balancing.kernels.choice import choose_kernel
    from balancing.kernels.trial import AttentionHeads
    from tests.gpu.training import local_device

    place = local_device(device)
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    lengths, heads, kv_heads, size = BATCHES[device]
    draw = torch.Generator().manual_seed(1)
    q, k, v, grad = (
        torch.randn(sum(lengths), h, size, generator=draw).to(place, torch.bfloat16)
        for h in (heads, kv_heads, kv_heads, heads)
    )
    pieces = Pieces(lengths, lengths, True)
    kernel = choose_kernel(place, AttentionHeads(torch.bfloat16, heads, kv_heads, size, size)).kernel
    out, logsumexp = kernel.forward(q, k, v, pieces, size**-0.5)
    whole = [out, *kernel.backward(grad, q, k, v, out, logsumexp, pieces, size**-0.5)]
    found: dict[str, tuple[float, float]] = {}
    refused: dict[str, str] = {}

    def measure(name: str, rows: Any, attention: Callable[..., Any]) -> None:
        leaves = [x[rows].clone().requires_grad_() for x in (q, k, v)]

        def layer() -> list[Any]:
            result = attention(*leaves)
            return [result, *torch.autograd.grad(result, leaves, grad[rows].view_as(result))]

        error = max(_error(one, other[rows]) for one, other in zip(layer(), whole, strict=True))
        dist.barrier()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(ROUNDS if device == "cuda" else 1):
            layer()
        torch.cuda.synchronize()
        found[name] = error, 1e3 * (time.perf_counter() - begin) / ROUNDS if device == "cuda" else 0.0

    measure("plan", *_ours(lengths, heads, kv_heads, size, place))
    for way in WAYS:
        rows, attention = _transformer_engines(way, lengths, heads, kv_heads, size, place)
        try:
            attention(*(x[rows] for x in (q, k, v)))  # chooses a backend, and says if there is none
        except (AssertionError, NotImplementedError, ValueError) as error:
            refused[way] = str(error).partition("\n")[0]
            continue
        measure(way, rows, attention)
    dist.destroy_process_group()
    return found, refused


def _error(found: Any, wanted: Any) -> float:
    return float((found.reshape(wanted.shape).float() - wanted.float()).norm() / wanted.float().norm())


def _ours(lengths: tuple[int, ...], heads: int, kv_heads: int, size: int, place: Any) -> tuple[Any, Callable]:
    """Tokens of this rank, and attention of them, by the plan that the planner chooses."""
    import torch
    import torch.distributed as dist

    from balancing.cluster import Cluster
    from balancing.sequences import AttentionShape, SequenceAttention, compile_rank, plan_sequences

    cluster = Cluster.preset("h200-8x400g").relabel(nodes=1, ranks_per_node=RANKS)
    shape = AttentionShape(heads * size, heads, kv_heads, 32, 4 * heads * size)
    plan = plan_sequences(lengths, cluster, shape=shape)
    rank = dist.get_rank()
    firsts = [sum(lengths[:number]) for number in range(len(lengths))]
    shards = [shard for shard in plan.linear if shard.rank == rank]
    rows = torch.cat([firsts[s.sequence] + torch.arange(s.start, s.stop) for s in sorted(shards)] or [torch.arange(0)])
    return rows.to(place), SequenceAttention(plan, program=compile_rank(plan, rank))


def _transformer_engines(
    way: str, lengths: tuple[int, ...], heads: int, kv_heads: int, size: int, place: Any
) -> tuple[Any, Callable]:
    """Tokens of this rank, and attention of them, by Transformer Engine's DotProductAttention."""
    import torch
    import torch.distributed as dist
    import transformer_engine  # noqa: F401  (loads the library that the next one is linked against)
    import transformer_engine_torch as tex
    from transformer_engine.pytorch import DotProductAttention

    rank, everyone = dist.get_rank(), list(range(RANKS))
    process_group: Any = dist.new_group(everyone)
    if way == "a2a+p2p":  # within pairs, and between them
        parts = [[dist.new_group(ranks) for ranks in split] for split in ([[0, 1], [2, 3]], [[0, 2], [1, 3]])]
        process_group = [parts[0][rank // 2], parts[1][rank % 2]]
    bounds = torch.tensor([0, *(sum(lengths[: n + 1]) for n in range(len(lengths)))], dtype=torch.int32, device=place)
    rows = tex.thd_get_partitioned_indices(bounds, sum(lengths), RANKS, rank)
    layer = DotProductAttention(
        heads, size, num_gqa_groups=kv_heads, attention_dropout=0.0, qkv_format="thd",
        attn_mask_type="padding_causal", cp_group=process_group, cp_global_ranks=everyone,
        cp_stream=torch.cuda.Stream(), cp_comm_type=way,
    )  # fmt: skip

    def attention(*qkv: Any) -> Any:
        return layer(
            *qkv, cu_seqlens_q=bounds, cu_seqlens_kv=bounds, cu_seqlens_q_padded=bounds, cu_seqlens_kv_padded=bounds,
            max_seqlen_q=max(lengths), max_seqlen_kv=max(lengths), pad_between_seqs=False,
        )  # fmt: skip

    return rows.long(), attention


def _attend_on_cpu() -> tuple[dict[str, tuple[float, float]], dict[str, str]]:
    from tests.support.transformer_engine.context import have_fused_attention

    have_fused_attention()
    return _attend("cpu")


def beside_transformer_engine(trial: Trial) -> None:
    device = trial.device
    by_rank = trial.run(RANKS, *((_attend_on_cpu,) if device == "cpu" else (_attend, device)))
    _, refused = by_rank[0]
    ways = {way: [found[way] for found, _ in by_rank] for way in by_rank[0][0]}
    assert {"plan", "p2p"} <= ways.keys() and (device == "cuda" or not refused), refused
    slowest = {way: max(ms for _, ms in of_ranks) for way, of_ranks in ways.items()}
    for way, of_ranks in ways.items():
        worst = max(error for error, _ in of_ranks)
        assert worst <= TOLERANCE, f"{way}: {worst:.1e} from one rank with all documents"
        name = "our plan" if way == "plan" else f"Transformer Engine's {way}"
        times = slowest["plan"] and f"{slowest[way]:.2f} ms, {slowest[way] / slowest['plan']:.2f} of our plan, "
        trial.figure(f"{name}: {times or ''}within {worst:.1e}")
    for way, why in refused.items():
        trial.figure(f"Transformer Engine's {way} does not apply: {why[:120]}")

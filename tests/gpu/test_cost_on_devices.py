"""What balanced sequences and experts cost one rank: launches, time of the host, kernels side by side.

The program of one rank runs with its messages stubbed: torch's fake process group starts nothing and waits for nothing.
What arrives is whatever lies in memory, so nothing is computed that means anything, at the right cost. On the CPU
operations that a GPU would launch are counted, and nothing is timed.
"""

import time
from collections.abc import Callable
from typing import Any

import numpy as np

# As many tokens as a rank of a real job has, and few. (ranks, lengths, query heads, key-value heads, size of a head)
BATCHES = {
    "cuda": (8, (32768, 8192, 8192, 4096, 4096, *(1024,) * 8), 32, 8, 128),
    "cpu": (8, (1024, 256, 256, 128, 128, *(32,) * 8), 4, 2, 16),
}
PLANNERS = ("chunks", "zones", "ring", "gather")
LAYERS = 5  # timed
# Operations of torch that start no kernel.
_VIEWS = ("view", "slice", "select", "split", "unbind", "transpose", "expand", "squeeze", "permute", "detach", "alias")
_MEMORY = ("empty", "_unsafe_view", "as_strided", "unflatten", "reshape", "t.default", "record_stream")


def _replays(device: str) -> dict[str, dict[str, float]]:
    """`_replay` of the first rank under each planner; on a GPU also the time of the slowest rank under `chunks`."""
    found = {planner: _replay(device, planner, 0) for planner in PLANNERS}
    if device == "cuda":
        every = [_replay(device, "chunks", rank)["all"] for rank in range(BATCHES[device][0])]
        found["slowest of all ranks, chunks"] = {"all": max(every)}
    return found


def _replay(device: str, planner: str, rank: int) -> dict[str, float]:
    """Launches forward and backward of one layer on one rank of a plan; on a GPU also microseconds of the host.

    Also the tokens of the rank, which say that there was something to do.
    """
    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from balancing.cluster import Cluster
    from balancing.sequences import AttentionShape, SequenceAttention, compile_rank, plan_sequences
    from tests.gpu.training import local_device

    place = local_device(device)
    ranks, lengths, heads, kv_heads, size = BATCHES[device]
    dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
    cluster = Cluster.preset("h200-8x400g").relabel(nodes=1, ranks_per_node=ranks)
    shape = AttentionShape(heads * size, heads, kv_heads, 32, 4 * heads * size)
    plan = plan_sequences(lengths, cluster, shape=shape, method=planner)
    attention = SequenceAttention(plan, program=compile_rank(plan, rank, cluster))
    tokens = int(plan.linear_tokens[rank])
    q, k, v = (
        torch.randn(tokens, h, size, device=place, dtype=torch.bfloat16).requires_grad_()
        for h in (heads, kv_heads, kv_heads)
    )

    def layer() -> None:
        out = attention(q, k, v)
        out.backward(torch.ones_like(out))

    layer()
    found: dict[str, float] = {"tokens": tokens, "launches": _launches(layer, device)}
    if device == "cuda":
        found |= _timed(layer)
    dist.destroy_process_group()
    return found


def _timed(call: Callable[[], Any]) -> dict[str, float]:
    """Microseconds of the host and in all of a call on a GPU, which has been warmed up."""
    import torch

    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(LAYERS):
        call()
    host = 1e6 * (time.perf_counter() - begin) / LAYERS
    torch.cuda.synchronize()
    return {"host": host, "all": 1e6 * (time.perf_counter() - begin) / LAYERS}


def _other_ways(device: str) -> dict[str, float]:
    """Microseconds, on a GPU, of attention over the whole batch on one rank, forward and backward: in one flash call,
    in one for each document, and by torch's flex attention, which is compiled. On the CPU calls are made, not timed."""
    import torch

    from balancing.sequences.engine.kernels import Pieces, choose_kernel
    from tests.gpu.training import local_device

    place = local_device(device)
    _, lengths, heads, kv_heads, size = BATCHES[device]
    tokens = sum(lengths)
    kernel = choose_kernel(place, torch.bfloat16, size)
    q, grad = (torch.randn(tokens, heads, size, device=place, dtype=torch.bfloat16) for _ in range(2))
    k, v = (torch.randn(tokens, kv_heads, size, device=place, dtype=torch.bfloat16) for _ in range(2))

    def flash(documents: tuple[int, ...], *given: torch.Tensor) -> None:
        pieces = Pieces(documents, documents, True)
        out, logsumexp = kernel.forward(*given[:3], pieces, 0.1)
        kernel.backward(given[3], *given[:3], out, logsumexp, pieces, 0.1)

    def one_by_one() -> None:
        for length, *given in zip(lengths, *(x.split(lengths) for x in (q, k, v, grad)), strict=True):
            flash((length,), *given)

    ways: dict[str, Callable[[], None]] = {"one flash call": lambda: flash(lengths, q, k, v, grad)}
    ways["a flash call a document"] = one_by_one
    if device == "cuda":
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        of = torch.repeat_interleave(torch.tensor(lengths)).to(place)
        mask = create_block_mask(
            lambda b, h, row, column: (row >= column) & (of[row] == of[column]), None, None, tokens, tokens, place
        )
        leaves = [x.transpose(0, 1)[None].contiguous().requires_grad_() for x in (q, k, v)]
        compiled = torch.compile(flex_attention)

        def flex() -> None:
            out = compiled(*leaves, block_mask=mask, enable_gqa=True)
            torch.autograd.grad(out, leaves, grad.transpose(0, 1)[None])

        ways["flex attention"] = flex
    found = {}
    for name, way in ways.items():
        try:
            way()
            found[name] = _timed(way)["all"] if device == "cuda" else 0.0
        except Exception as error:
            if name != "flex attention":
                raise
            found[f"{name} fails ({type(error).__name__})"] = 0.0
    return found


def _launches(call: Callable[[], None], device: str) -> int:
    """Kernels that a call starts, copies and fills included; on the CPU, operations that would start one."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    if device == "cuda":
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            call()
            torch.cuda.synchronize()
        return sum(event.device_type == torch.autograd.DeviceType.CUDA for event in profile.events())

    class Counted(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            name = function.name().removeprefix("aten::")
            Counted.count += not name.startswith((*_VIEWS, *_MEMORY))
            return function(*args, **(kwargs or {}))

    with Counted():
        call()
    return Counted.count


def _side_by_side(device: str) -> dict[str, float]:
    """Tera-FLOP/s of each kernel, forward and backward, on one long sequence, and milliseconds of a merge; zeros on the
    CPU, where nothing is timed."""
    import torch

    from balancing.sequences.engine.kernels import Pieces, merge
    from tests.gpu.test_attention import _kernels
    from tests.gpu.training import local_device

    place = local_device(device)
    tokens, heads, size = (8192, 32, 128) if device == "cuda" else (64, 4, 64)
    pieces = Pieces((tokens,), (tokens,), True)
    q, k, v, grad = (torch.randn(tokens, heads, size, device=place, dtype=torch.bfloat16) for _ in range(4))
    found: dict[str, float] = {}

    def seconds(call: Callable[[], Any]) -> float:
        call()
        if device == "cpu":
            return 0.0
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(10):
            call()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e4

    for name, kernel, dtype, _ in _kernels(device):
        if dtype is not torch.bfloat16:
            continue
        out, logsumexp = kernel.forward(q, k, v, pieces, 0.1)
        flops = 2 * tokens * tokens * heads * size  # of the forward pass, half of the pairs
        for way, factor, call in (
            ("forward", 1.0, lambda kernel=kernel: kernel.forward(q, k, v, pieces, 0.1)),
            (
                "backward",
                2.5,
                lambda kernel=kernel, out=out, lse=logsumexp: kernel.backward(grad, q, k, v, out, lse, pieces, 0.1),
            ),
        ):
            took = seconds(call)
            found[f"{name} {way}, TFLOP/s"] = factor * flops / took / 1e12 if took else 0.0
    parts = [(out.float(), logsumexp), (out, logsumexp)]
    found["merge, ms"] = 1e3 * seconds(lambda: merge(*parts[0], *parts[1]))
    return found


def test_launches_on_a_device(ranks, device, figure):
    (replayed,) = ranks.run(1, _replays, device)
    for planner, found in replayed.items():
        launches = f"{found['launches']:.0f} launches" if "launches" in found else ""
        assert planner not in PLANNERS or (found["launches"] > 10 and found["tokens"] > 0)
        host = f" host {found['host']:.0f} us" if "host" in found else ""
        figure(f"{planner}: {launches}{host}" + (f" {found['all'] / 1e3:.2f} ms" if "all" in found else ""))
    (others,) = ranks.run(1, _other_ways, device)
    assert len(others) >= 2
    figure("whole batch on one rank: " + ", ".join(f"{name} {us / 1e3:.2f} ms" for name, us in others.items()))
    (speeds,) = ranks.run(1, _side_by_side, device)
    assert {"merge, ms"} < speeds.keys()
    figure(", ".join(f"{name}: {value:.3g}" for name, value in speeds.items()))


# A layer as in Mixtral 8x7B over 8 ranks, two experts a token. (tokens of a rank, hidden size, size of an expert)
MOE = {"cuda": (4096, 4096, 14336), "cpu": (64, 32, 64)}
EXPERTS = 8


def _shares(device: str) -> dict[str, tuple[int, float]]:
    """(rows, milliseconds) of a rank's experts, forward and backward in bf16: of the slowest rank without replicas,
    with those that the planner places, and of the mean. The hottest expert has 2.7 times the mean load."""
    import torch

    from balancing.cluster import Cluster
    from balancing.experts import plan_replicas, split_tokens
    from tests.gpu.training import local_device

    place = local_device(device)
    tokens, hidden, size = MOE[device]
    share = np.array([2.7, 1.4, 1.0, 0.8, 0.7, 0.6, 0.5, 0.3])
    load = np.tile((2 * tokens / EXPERTS * share / share.mean()).astype(int), (EXPERTS, 1))
    cluster = Cluster.preset("h200-8x400g").relabel(nodes=1, ranks_per_node=EXPERTS)
    placement = plan_replicas(load, cluster, slots=2)
    split = split_tokens(load, placement).sum(0)  # [expert, rank]
    rank = int(split.sum(0).argmax())
    cases = {
        "slowest without replicas": [int(load.sum(0).max())],
        "slowest with replicas": [int(rows) for rows in split[:, rank] if rows],
        "mean": [int(load.sum() // EXPERTS)],
    }
    found = {}
    for name, groups in cases.items():
        rows = torch.randn(sum(groups), hidden, device=place, dtype=torch.bfloat16).requires_grad_()
        up, down = (
            [torch.randn(*shape, device=place, dtype=torch.bfloat16).requires_grad_() for _ in groups]
            for shape in ((2 * size, hidden), (hidden, size))
        )

        def layer(groups: list[int] = groups, rows: Any = rows, up: Any = up, down: Any = down) -> None:
            outs = []
            for part, first, second in zip(rows.split(groups), up, down, strict=True):  # as SequentialMLP
                gate, value = torch.nn.functional.linear(part, first).chunk(2, dim=-1)
                outs.append(torch.nn.functional.linear(torch.nn.functional.silu(gate) * value, second))
            out = torch.cat(outs)
            torch.autograd.grad(out, [rows, *up, *down], torch.ones_like(out))

        layer()
        found[name] = sum(groups), _timed(layer)["all"] / 1e3 if device == "cuda" else 0.0
    return found


def test_shares_of_a_moe_layer(ranks, device, figure):
    (found,) = ranks.run(1, _shares, device)
    assert found["slowest with replicas"][0] < 1.1 * found["mean"][0] < found["slowest without replicas"][0] / 2
    figure(", ".join(f"{name}: {rows} rows, {ms:.2f} ms" for name, (rows, ms) in found.items()))

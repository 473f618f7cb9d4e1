"""What attention over balanced sequences costs one rank: launches, time of the host, kernels side by side.

The program of one rank runs with its messages stubbed: torch's fake process group starts nothing and waits for nothing.
What arrives is whatever lies in memory, so nothing is computed that means anything, at the right cost. On the CPU
operations that a GPU would launch are counted, and nothing is timed.
"""

import time
from collections.abc import Callable
from typing import Any

# As many tokens as a rank of a real job has, and few. (ranks, lengths, query heads, key-value heads, size of a head)
BATCHES = {
    "cuda": (8, (32768, 8192, 8192, 4096, 4096, *(1024,) * 8), 32, 8, 128),
    "cpu": (8, (1024, 256, 256, 128, 128, *(32,) * 8), 4, 2, 16),
}
PLANNERS = ("auto", "chunks", "zones", "ring", "gather")
LAYERS = 5  # timed
# Operations of torch that start no kernel.
_VIEWS = ("view", "slice", "select", "split", "unbind", "transpose", "expand", "squeeze", "permute", "detach", "alias")
_MEMORY = ("empty", "_unsafe_view", "as_strided", "unflatten", "reshape", "t.default", "record_stream")


def _replay(device: str, planner: str) -> dict[str, float]:
    """Launches forward and backward of one layer on the first rank of a plan; on a GPU also microseconds of the host.

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
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    cluster = Cluster.preset("h200-8x400g").relabel(nodes=1, ranks_per_node=ranks)
    shape = AttentionShape(heads * size, heads, kv_heads, 32, 4 * heads * size)
    plan = plan_sequences(lengths, cluster, shape=shape, method=planner)
    attention = SequenceAttention(plan, program=compile_rank(plan, 0, cluster))
    tokens = int(plan.linear_tokens[0])
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
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(LAYERS):
            layer()
        found["host"] = 1e6 * (time.perf_counter() - begin) / LAYERS
        torch.cuda.synchronize()
        found["all"] = 1e6 * (time.perf_counter() - begin) / LAYERS
    dist.destroy_process_group()
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
    cells = []
    for planner in PLANNERS:
        (found,) = ranks.run(1, _replay, device, planner)
        assert found["launches"] > 10 and found["tokens"] > 0
        host = f", host {found['host']:.0f} of {found['all']:.0f} us" if "host" in found else ""
        cells.append(f"{planner}: {found['launches']:.0f} launches{host}")
    (speeds,) = ranks.run(1, _side_by_side, device)
    assert {"merge, ms"} < speeds.keys()
    figure("; ".join([*cells, *(f"{name}: {value:.3g}" for name, value in speeds.items() if value)]))

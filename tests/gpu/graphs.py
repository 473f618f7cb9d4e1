"""A layer's attention, captured as CUDA graphs and replayed, against the same without graphs, on ranks that exchange
keys: the bits of several micro-batches in flight, and what a layer takes. On the CPU device a stand-in captures."""

import time
from typing import Any

from tests.gpu.trial import Trial

RANKS, LAYERS, BATCHES = 2, 8, 3
# (lengths of documents, query heads, key-value heads, size of a head)
SIZES = {"cuda": ((8192, 2048, 2048, 1024, 1024, *(256,) * 8), 32, 8, 128), "cpu": ((128, 32, 16, 16), 4, 2, 16)}
PLANNERS = ("ring", "chunks")  # messages between two ranks; collectives


def _attend(device: str) -> dict[str, tuple[float, float]]:
    """{"plain", "replayed": milliseconds of a layer with `chunks`, of the host and in all}; zeros on the CPU. Raises
    AssertionError where a bit differs, or where memory is left."""
    from functools import partial

    import torch
    import torch.distributed as dist

    from balancing.cluster import Cluster
    from balancing.kernels.choice import choose_kernel
    from balancing.kernels.trial import AttentionHeads
    from balancing.sequences import AttentionShape, SequenceAttention, compile_rank, plan_sequences
    from balancing.sequences.engine.captured import CapturedAttention, Graphs
    from tests.gpu.training import local_device
    from tests.support.stand_ins import captured_attention

    if device == "cpu":
        captured_attention.install()
    place = local_device(device)
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    lengths, heads, kv_heads, size = SIZES[device]
    shape = AttentionShape(heads * size, heads, kv_heads, 32, 4 * heads * size)
    cluster = Cluster.preset("h200-8x400g").relabel(1, RANKS)
    graphs = Graphs()
    ways: dict[str, Any] = {"plain": SequenceAttention, "replayed": partial(CapturedAttention, graphs=graphs)}

    def step(way: str, method: str, batches: int = BATCHES) -> tuple[list[torch.Tensor], tuple[float, float]]:
        """Results of micro-batches that all go forward before the first goes back; milliseconds of a layer."""
        plan = plan_sequences(lengths, cluster, shape=shape, method=method)
        program = compile_rank(plan, dist.get_rank())
        draw = torch.Generator(place).manual_seed(1)
        shapes = [(int(plan.linear_tokens[dist.get_rank()]), each, size) for each in (heads, kv_heads, kv_heads)]
        flying, found = [], []
        for _ in range(batches):
            attention = ways[way](plan, program=program, timed=False, kernel=kernel)
            attention.transport.in_order = True
            attention.upload(place)
            drawn = [[torch.randn(each, generator=draw, device=place) for each in shapes] for _ in range(LAYERS)]
            flying.append((attention, [[x.bfloat16().requires_grad_() for x in qkv] for qkv in drawn]))
        dist.barrier()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        outputs = [[attention(*qkv) for qkv in layers] for attention, layers in flying]
        for (_, layers), of_layers in zip(flying, outputs, strict=True):
            for qkv, out in zip(reversed(layers), reversed(of_layers), strict=True):
                found += [out.detach(), *torch.autograd.grad(out, qkv, out.detach())]
        host = time.perf_counter() - begin
        torch.cuda.synchronize()
        both = (1e3 * seconds / (batches * LAYERS) for seconds in (host, time.perf_counter() - begin))
        return found, ((*both,) if device == "cuda" else (0.0, 0.0))  # type: ignore[return-value]

    of_layer = AttentionHeads(torch.bfloat16, heads, kv_heads, size, size)
    torch.use_deterministic_algorithms(True)  # or gradients would differ without graphs, too
    kernel = choose_kernel(place, of_layer).kernel
    for method in PLANNERS:
        plain, replayed = (step(way, method)[0] for way in ways)
        same = [torch.equal(one, other) for one, other in zip(plain, replayed, strict=True)]
        assert all(same), f"{method}: {same.count(False)} of {len(same)} results differ"
    del plain, replayed
    torch.use_deterministic_algorithms(False)
    kernel = choose_kernel(place, of_layer).kernel
    took = {way: [step(way, "chunks")[1] for _ in range(2)][-1] for way in ways}
    held = []
    for _ in range(3):
        step("replayed", "chunks", 1)
        graphs.clear()
        held.append(torch.cuda.memory_allocated())
    assert device == "cpu" or held[0] == held[-1], f"memory after each of three steps: {held}"
    graphs.close()
    dist.destroy_process_group()
    return took


def attention(trial: Trial) -> None:
    by_rank = trial.run(RANKS, _attend, trial.device)
    trial.figure(f"no bit differs: {' and '.join(PLANNERS)}, {BATCHES} micro-batches in flight, {LAYERS} layers")
    for way in by_rank[0]:
        host, whole = (max(took[way][of] for took in by_rank) for of in (0, 1))
        trial.figure(f"a layer, {way}: host {host:.2f} ms, in all {whole:.2f} ms" if whole else f"{way} runs")

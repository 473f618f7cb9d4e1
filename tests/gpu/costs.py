"""What balanced sequences and experts cost one GPU: rates of kernels, launches, time of the host. Each function is the
body of a part's only rank, and runs while nothing else does.

The program of one rank of a plan runs with its messages stubbed: torch's fake process group starts nothing and waits
for nothing. What arrives is whatever lies in memory, so nothing is computed that means anything, at the right cost. On
the CPU operations that a GPU would launch are counted, and nothing is timed."""

import cProfile
import pstats
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from balancing.kernels.base import CPU, Kernel, Pieces
from balancing.kernels.choice import kernels_of_gpu
from balancing.sequences import causal_area
from balancing.sequences.engine.program import Compute
from benchmarks.host.attention import busiest, packed_documents
from tests.gpu.training import local_device
from tests.gpu.trial import Notes
from tests.support.stand_ins import captured_attention

# (ranks, query heads, key-value heads, size of a head) of the layer that is planned
LAYER = {"cuda": (8, 32, 8, 128), "cpu": (8, 4, 2, 16)}
PACKED = tuple(packed_documents(8))  # 9k tokens a rank
# Documents and key-value heads, by name.
CASES = {
    "packed 72k": (PACKED, 8),
    "1 x 32k": ((32768,), 8),
    "8 x 8k": ((8192,) * 8, 8),
    "64 x 1k": ((1024,) * 64, 8),
    "512 x 128": ((128,) * 512, 8),
    "1 x 16k, 32 key heads": ((16384,), 32),
}
# Ranks, on nodes of eight, and the planners whose plans are timed there.
PLANS = {device: ((8, ("chunks", "zones", "ring", "gather")), (16, ("chunks",)), (64, ("chunks",))) for device in LAYER}
ROUNDS = 5  # timed
# Operations of torch that start no kernel.
_VIEWS = ("view", "slice", "select", "split", "unbind", "transpose", "expand", "squeeze", "permute", "detach", "alias")
_MEMORY = ("empty", "_unsafe_view", "as_strided", "unflatten", "reshape", "t.default", "record_stream")


def _shrunk(lengths: tuple[int, ...], device: str) -> tuple[int, ...]:
    return lengths if device == "cuda" else tuple(max(1, length // 32) for length in lengths[:16])


def _timed(call: Callable[[], Any], device: str) -> tuple[float, float]:
    """Milliseconds of the host and of the device for a call, which is warmed up first; zeros on the CPU."""
    call()
    if device == "cpu":
        return 0.0, 0.0
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    started = time.perf_counter()
    begin.record()
    for _ in range(ROUNDS):
        call()
    end.record()
    host = 1e3 * (time.perf_counter() - started) / ROUNDS
    end.synchronize()
    return host, begin.elapsed_time(end) / ROUNDS


# -- attention ---------------------------------------------------------------------------------------------------------


def _kernels(lengths: tuple[int, ...], q: Any, k: Any, v: Any, grad: Any) -> Iterator[tuple[str, Callable, Callable]]:
    """(name, forward, forward and backward) of attention over packed documents on one rank, by kernel. Raises where a
    kernel is asked for that is not installed, or that does not take these documents."""
    size, heads, kv_heads = q.shape[-1], q.shape[1], k.shape[1]
    pieces, scale = Pieces(lengths, lengths, True), size**-0.5

    def ours(title: str, kernel: Kernel) -> tuple[str, Callable, Callable]:
        def forward() -> Any:
            return kernel.forward(q, k, v, pieces, scale)

        return f"ours ({title})", forward, lambda: kernel.backward(grad, q, k, v, *forward(), pieces, scale)

    def by_gradient(name: str, attention: Callable, *given: Any, of: Any = None) -> tuple[str, Callable, Callable]:
        leaves = [x.detach().requires_grad_() for x in given]
        of = grad.reshape(len(q), -1) if of is None else of

        def both() -> Any:
            made = attention(*leaves)
            return torch.autograd.grad(made, leaves, of.view_as(made))

        return name, lambda: attention(*leaves), both

    def engine() -> tuple[str, Callable, Callable]:
        from transformer_engine.pytorch import DotProductAttention

        layer = DotProductAttention(
            heads,
            size,
            num_gqa_groups=kv_heads,
            attention_dropout=0.0,
            qkv_format="thd",
            attn_mask_type="padding_causal",
        )
        bounds = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32, device=q.device)
        more = {"cu_seqlens_q": bounds, "cu_seqlens_kv": bounds}
        longest = {"max_seqlen_q": max(lengths), "max_seqlen_kv": max(lengths)}
        return by_gradient("Transformer Engine", lambda *qkv: layer(*qkv, **more, **longest), q, k, v)

    def cudnn() -> tuple[str, Callable, Callable]:
        from torch.nn.attention import SDPBackend, sdpa_kernel
        from torch.nn.functional import scaled_dot_product_attention

        assert len(set(lengths)) == 1, "documents of one length only"

        def batch(x: Any) -> Any:
            return x.view(len(lengths), lengths[0], *x.shape[1:]).transpose(1, 2).contiguous()

        def attention(*qkv: Any) -> Any:
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                return scaled_dot_product_attention(*qkv, is_causal=True, enable_gqa=kv_heads < heads)

        return by_gradient("cuDNN by torch's SDPA", attention, *map(batch, (q, k, v)), of=batch(grad))

    def flex() -> tuple[str, Callable, Callable]:
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        of = torch.repeat_interleave(torch.tensor(lengths)).to(q.device)
        tokens = len(q)
        mask = create_block_mask(
            lambda b, h, row, column: (row >= column) & (of[row] == of[column]), None, None, tokens, tokens, q.device
        )
        compiled = torch.compile(flex_attention)
        turned = [x.transpose(0, 1)[None].contiguous() for x in (q, k, v)]
        attention = lambda *qkv: compiled(*qkv, block_mask=mask, enable_gqa=True)  # noqa: E731
        return by_gradient("flex attention", attention, *turned, of=grad.transpose(0, 1)[None].contiguous())

    if not q.is_cuda:
        yield ours("torch's for CPUs", CPU)
    for _, title, kernel in kernels_of_gpu(q.device) if q.is_cuda else ():
        yield ours(title, kernel)
    if q.is_cuda:
        for make in (engine, cudnn, *((flex,) if lengths == PACKED else ())):
            try:
                yield make()
            except (ImportError, AssertionError):
                continue


def _rates(lengths: tuple[int, ...], kv_heads: int, device: str) -> dict[str, tuple[float, float]]:
    """Milliseconds forward and backward of each kernel on these documents, of one rank that has them all."""
    _, heads, _, size = LAYER[device]
    place, kv_heads = local_device(device), min(kv_heads, heads)
    q, grad = (torch.randn(sum(lengths), heads, size, device=place, dtype=torch.bfloat16) for _ in range(2))
    k, v = (torch.randn(sum(lengths), kv_heads, size, device=place, dtype=torch.bfloat16) for _ in range(2))
    found: dict[str, tuple[float, float]] = {}
    for name, forward, both in _kernels(lengths, q, k, v, grad):
        try:
            alone = _timed(forward, device)[1]
            found[name] = alone, _timed(both, device)[1] - alone
        except Exception as error:  # a kernel of others that does not take these shapes
            if name in ("ours (FlashAttention 2)", "ours (torch's for CPUs)"):
                raise
            found[f"{name} fails ({type(error).__name__})"] = 0.0, 0.0
    return found


def _best(found: dict[str, tuple[float, float]]) -> tuple[str, float]:
    """The kernel whose forward and backward are quickest, and their milliseconds."""
    name = min((name for name, took in found.items() if sum(took)), key=lambda name: sum(found[name]), default="none")
    return name, sum(found.get(name, (0.0,)))


def attention_rates(device: str, notes: Notes) -> None:
    """TFLOP/s of each kernel that is installed, bf16, causal, forward / backward, on documents of one length and
    mixed."""
    ranks, heads, _, size = LAYER[device]
    for case, (given, kv_heads) in CASES.items():
        lengths = _shrunk(given, device)
        found = _rates(lengths, kv_heads, device)
        assert any(name.startswith("ours") for name in found)
        flops = (
            sum(2.0 * length * length for length in lengths) * heads * size
        )  # of the forward pass, half of the pairs
        said = [
            f"{name} {flops / forward / 1e9:.0f} / {2.5 * flops / backward / 1e9:.0f}" if forward and backward else name
            for name, (forward, backward) in found.items()
        ]
        name, best = _best(found)
        share = f"; an even share of {ranks} by {name} {best / ranks:.2f} ms" if best else ""
        notes.figure(f"{case}: {', '.join(said)}{share}")


def planners(device: str, notes: Notes) -> None:
    """One layer as training runs it, forward and backward: the program of the busiest rank of each plan, beside the
    even share of attention's work by the best kernel. On 8 ranks of a node by each planner, over nodes by `chunks`."""
    whole = _rates(_shrunk(PACKED, device), LAYER[device][2], device)
    name, best = _best(whole)
    for ranks, methods in PLANS[device]:
        lengths = _shrunk(tuple(packed_documents(ranks)), device)
        even = best * causal_area(lengths) / causal_area(_shrunk(PACKED, device)) / ranks
        if best:
            notes.figure(f"even share of {ranks}: {even:.1f} ms by {name}")
        for method in methods:
            found = _replay(device, lengths, ranks, method, notes)
            times = ""
            if even:
                times = f", host {found['host']:.1f} ms, {found['host'] / even:.2f} of the even share, device "
                times += f"{found['device']:.1f} ms, {found['device'] / even:.2f}, in all {found['all']:.1f} ms"
                times += f"; the best kernel's share of the device {found['attention'] / found['device']:.0%}"
            where = f"{method}, rank {found['rank']:.0f} of {ranks}"
            notes.figure(f"{where}: {found['calls']:.0f} calls, {found['launches']:.0f} launches{times}")


def _replay(device: str, lengths: tuple[int, ...], ranks: int, method: str, notes: Notes) -> dict[str, float]:
    """The program of the busiest rank of a plan: its rank, calls of attention forward and backward, launches, and
    milliseconds of the host, in all, of kernels and of those of attention. Notes the device's time by kind of kernel,
    and the dearest functions of the host."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from balancing.cluster import Cluster
    from balancing.sequences import AttentionShape, SequenceAttention, plan_sequences
    from balancing.sequences.engine import transport
    from balancing.sequences.engine.captured import CapturedAttention, Graphs

    start = transport.start_all_to_all

    def started(into: Any, rows: Any, received: Any, sent: Any, process_group: Any) -> Any:
        # Torch's fake group refuses a rank that receives and sends nothing.
        sends = (rows, received, sent) if len(rows) else (into, received, received)
        return start(into, *sends, process_group)

    transport.start_all_to_all = started
    place = local_device(device)
    heads, kv_heads, size = LAYER[device][1:]
    nodes = max(1, ranks // 8)
    cluster = Cluster.preset("h200-8x400g").relabel(nodes, ranks // nodes)
    shape = AttentionShape(heads * size, heads, kv_heads, 32, 4 * heads * size)
    plan = plan_sequences(lengths, cluster, shape=shape, method=method)
    program = busiest(plan)
    dist.init_process_group("fake", rank=program.rank, world_size=ranks, store=FakeStore())
    attention = SequenceAttention(plan, program=program)
    tokens = int(plan.linear_tokens[program.rank])
    q, k, v = (
        torch.randn(tokens, h, size, device=place, dtype=torch.bfloat16).requires_grad_()
        for h in (heads, kv_heads, kv_heads)
    )

    def layer(attention: SequenceAttention = attention) -> None:
        out = attention(q, k, v)
        out.backward(torch.ones_like(out))

    host, elapsed = _timed(layer, device)
    launches, kinds = _launches(layer, device)
    where = f"{method}, {ranks} ranks"
    if kinds:
        by_kind = ", ".join(f"{kind} {took:.2f} ms in {count}" for kind, (count, took) in kinds.items())
        notes.detail(f"{where}: {by_kind}")
    notes.detail(f"{where}: dearest on the host, under a profiler: {', '.join(_dearest(layer))}")
    if device == "cpu":
        captured_attention.install()
    graphs = Graphs()
    captured = CapturedAttention(plan, program=program, graphs=graphs)
    layer(captured)  # without graphs; the next call captures them
    graph_host, graph_elapsed = _timed(lambda: layer(captured), device)
    graphs.close()
    if graph_host:
        notes.figure(
            f"{where}, replayed: host {graph_host:.2f} ms instead of {host:.2f}, in all "
            f"{max(graph_host, graph_elapsed):.2f} ms instead of {max(host, elapsed):.2f}"
        )
    dist.destroy_process_group()
    transport.start_all_to_all = start
    steps = (*program.program.forward, *program.program.backward)
    calls = sum(isinstance(step, Compute) and step.call is not None for step in steps)
    assert tokens and calls and launches > calls
    took = {kind: milliseconds for kind, (_, milliseconds) in kinds.items()}
    found = {"rank": program.rank, "calls": calls, "launches": launches, "host": host, "all": max(host, elapsed)}
    return found | {"device": sum(took.values()), "attention": took.get("attention", 0.0)}


def _dearest(call: Callable[[], None], number: int = 10) -> list[str]:
    """The functions that take the host longest by themselves, with microseconds and calls of one call. Backward runs in
    this thread, so that its functions are seen."""
    profile = cProfile.Profile()
    with torch.autograd.set_multithreading_enabled(False):
        call()
        with profile:
            for _ in range(ROUNDS):
                call()
    rows = sorted(pstats.Stats(profile).stats.items(), key=lambda row: -row[1][2])[:number]  # type: ignore[attr-defined]
    return [
        f"{name.strip('<>')} ({Path(file).name}:{line}) {1e6 * own / ROUNDS:.0f} us in {count / ROUNDS:.0f}"
        for (file, line, name), (_, count, own, *_) in rows
    ]


# Kinds of kernels by parts of their names; the first that fits counts. cuDNN and FlashAttention start helpers of their
# own beside attention; sums and merges are our Triton kernels.
KINDS = {
    "helpers of attention": ("dot_do_o", "convert_d", "reduce_head", "tma_setup", "cudnn::fusion"),
    "attention": ("flash", "sdpa", "fmha"),
    "sums": ("add_kernel",),
    "merges": ("merge_kernel",),
    "copies and fills": ("Memcpy", "Memset", "copy", "Fill", "fill", "Cat", "index", "elementwise"),
}


def kind_of(kernel: str) -> str:
    """The kind of a kernel in `KINDS`, or "other"."""
    return next((kind for kind, parts in KINDS.items() if any(part in kernel for part in parts)), "other")


def _launches(call: Callable[[], None], device: str) -> tuple[int, dict[str, tuple[int, float]]]:
    """Kernels that a call starts, copies and fills included, and by kind their number and milliseconds. On the CPU,
    operations that would start one, and no kinds."""
    from torch.utils._python_dispatch import TorchDispatchMode

    if device == "cuda":
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            call()
            torch.cuda.synchronize()
        kinds: dict[str, tuple[int, float]] = {}
        for event in profile.events():
            if event.device_type == torch.autograd.DeviceType.CUDA:
                count, took = kinds.get(kind := kind_of(event.name), (0, 0.0))
                kinds[kind] = count + 1, took + event.time_range.elapsed_us() / 1e3
        return sum(count for count, _ in kinds.values()), kinds

    class Counted(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            name = function.name().removeprefix("aten::")
            Counted.count += not name.startswith((*_VIEWS, *_MEMORY))
            return function(*args, **(kwargs or {}))

    with Counted():
        call()
    return Counted.count, {}


# -- experts -----------------------------------------------------------------------------------------------------------

# Hidden size, size of an expert, experts of a rank, and its rows of a step.
EXPERTS = {
    "Mixtral 8x7B, EP 8": (4096, 14336, 1, 8192),
    "Qwen3-30B-A3B, EP 8": (2048, 768, 16, 32768),
    "Qwen3-235B-A22B, EP 8": (4096, 1536, 16, 32768),
    "DeepSeek-V3, EP 8": (7168, 2048, 32, 32768),
}
REPLICAS = (0, 1, 2)
ALONE = "one expert after the other"  # in `TITLES`; it runs everywhere


def _groups(experts: int, rows: int, skewed: bool) -> list[int]:
    """Rows of each expert: equal ones, or such that each next one has 0.7 of it."""
    shares = 0.7 ** np.arange(experts) if skewed else np.ones(experts)
    groups = np.maximum(16, (rows * shares / shares.sum()).astype(int) // 16 * 16)
    groups[0] += rows - groups.sum()
    return [int(group) for group in groups]


def _experts(groups: list[int], hidden: int, size: int, place: Any) -> dict[str, Callable[[], Any]]:
    """A gated feed-forward layer of one rank's experts, forward and backward in bf16, by each of the products among
    which training chooses and that are installed."""
    from torch.nn.functional import silu

    from balancing.kernels.expert_choice import GEMMS, TITLES

    def matrix(*shape: int) -> Any:
        return torch.randn(*shape, device=place, dtype=torch.bfloat16).mul_(0.02).requires_grad_()

    rows = matrix(sum(groups), hidden)
    up, down = ([matrix(*sizes) for _ in groups] for sizes in ((2 * size, hidden), (hidden, size)))
    leaves, ways = [rows, *up, *down], {}

    def trained(first: Callable, second: Callable) -> Callable[[], Any]:
        def call() -> Any:
            gate, value = first(rows, groups).chunk(2, dim=-1)
            out = second(silu(gate) * value, groups)
            return torch.autograd.grad(out, leaves, torch.ones_like(out))

        return call

    for name, made in GEMMS.items():
        if place.type == "cpu" and name == "te":
            continue
        try:
            ways[TITLES[name]] = trained(made(up), made(down))
        except ImportError:
            continue
    return ways


def expert_rates(device: str, notes: Notes) -> None:
    """TFLOP/s of a rank's experts, rows even / skewed, without and with replicas, by each of the products; the
    milliseconds that an even share takes the best of them, and what training would choose."""
    from balancing.kernels.expert_choice import TITLES, ExpertSizes, choose_gemm

    place = local_device(device)
    for shape, (hidden, size, experts, given) in EXPERTS.items():
        rows = given
        if device == "cpu":
            hidden, size, rows = 64, 32, 2048
        best = ("", np.inf)
        for count in (experts + more for more in REPLICAS):
            rates: dict[str, list[str]] = {}
            for skewed in (False, True):
                groups = _groups(count, rows, skewed)
                assert sum(groups) == rows and min(groups) > 0
                for way, call in _experts(groups, hidden, size, place).items():
                    try:
                        took = _timed(call, device)[1]
                    except Exception as error:  # another torch has no gradient of a grouped product
                        if way == ALONE:
                            raise
                        rates.setdefault(way, []).append(f"fails ({type(error).__name__})")
                        continue
                    rates.setdefault(way, []).append(f"{18 * rows * hidden * size / took / 1e9:.0f}" if took else "-")
                    if took and not skewed and count == experts:
                        best = min(best, (way, took), key=lambda pair: pair[1])
            said = ", ".join(f"{way} {' / '.join(each)}" for way, each in rates.items())
            notes.figure(f"{shape}, {experts} experts, {count - experts} replicas: {said}")
        if best[0]:
            notes.figure(f"{shape}: an even share {best[0]} {best[1]:.2f} ms")
        sizes = ExpertSizes(torch.bfloat16, hidden, size, True, experts + REPLICAS[-1], rows)
        choice = choose_gemm(place, sizes, "te" if TITLES["te"] in rates else "sequential")
        notes.figure(f"{shape}: {choice.line}")
        assert device == "cpu" or "torch" in choice.rates, choice.line


# (expert-parallel ranks, experts, instances of the hottest expert at least, late slots)
SPLITS = {
    "cuda": (
        *((8, 128, 1, 0), (16, 256, 1, 0), (32, 256, 1, 0), (64, 256, 1, 0), (64, 512, 1, 0), (128, 256, 1, 0)),
        *((64, 256, 20, 0), (64, 256, 1, 1)),
    ),
    "cpu": ((8, 16, 1, 0),),
}


def split_times(device: str, notes: Notes) -> None:
    """Microseconds of the host and of the device for a split of tokens, and seconds of the first of a size: compiled,
    or from Triton's cache."""
    from balancing.experts.late import LATE_GOAL
    from balancing.experts.placement import ReplicaPlacement, color_by_rank
    from balancing.experts.split.split import Splitter, sweeps_of
    from balancing.experts.split.split_kernel import SplitKernels, kernel_tables
    from balancing.upload import upload

    place, draw = local_device(device), np.random.default_rng(0)
    for ranks, experts, hottest, late in SPLITS[device]:
        home = np.arange(experts) * ranks // experts
        slots = np.stack([draw.choice(np.flatnonzero(home != rank), 2, replace=False) for rank in range(ranks)])
        slots[(slots == 0).any(1)] = -1
        slots[1:hottest, 0] = 0
        placement = ReplicaPlacement(home, slots, ranks_per_node=min(8, ranks))
        placement = placement.with_late(np.full((ranks, late), -1))
        load = draw.integers(0, 1000, (ranks, experts))
        if device == "cpu":  # which has no kernels to time
            assert Splitter(placement, sweeps=4)(load).sum() == load.sum()
            notes.figure(f"{ranks} x {experts}: split by NumPy")
            continue
        classes = color_by_rank(placement)
        sweeps, tables = sweeps_of(placement, len(classes)), upload(kernel_tables(placement, classes), place)
        kernels, there = SplitKernels(placement, len(classes), sweeps, tables), torch.from_numpy(load).to(place)
        permille = round(1000 * LATE_GOAL) if late else None
        begin = time.perf_counter()
        kernels(there, range(1), permille)
        torch.cuda.synchronize()
        first = time.perf_counter() - begin
        host, on_device = _timed(lambda: [kernels(there, range(1), permille) for _ in range(20)], device)  # noqa: B023
        how = f"{ranks} x {experts}" + f", {hottest} instances" * (hottest > 1) + ", late copies" * late
        turns = f"{sweeps * len(classes)} turns"
        notes.figure(f"{how}: device {50 * on_device:.0f} us ({turns}), host {50 * host:.0f} us, first {first:.1f} s")


# A layer as in Mixtral 8x7B over 8 ranks, two experts a token. (tokens of a rank, hidden size, size of an expert)
MOE = {"cuda": (4096, 4096, 14336), "cpu": (64, 32, 64)}
RANKS = 8


def moe_shares(device: str, notes: Notes) -> None:
    """Rows and milliseconds of a rank's experts: of the slowest rank without replicas, with those that the planner
    places, and of the mean, which is the even share. The hottest expert has 2.7 times the mean load."""
    from balancing.cluster import Cluster
    from balancing.experts import plan_replicas, split_tokens

    place = local_device(device)
    tokens, hidden, size = MOE[device]
    share = np.array([2.7, 1.4, 1.0, 0.8, 0.7, 0.6, 0.5, 0.3])
    load = np.tile((2 * tokens / RANKS * share / share.mean()).astype(int), (RANKS, 1))
    cluster = Cluster.preset("h200-8x400g").relabel(nodes=1, ranks_per_node=RANKS)
    placement = plan_replicas(load, cluster, slots=2)
    split = split_tokens(load, placement).sum(0)  # [expert, rank]
    rank = int(split.sum(0).argmax())
    cases = {
        "slowest without replicas": [int(load.sum(0).max())],
        "slowest with replicas": [int(rows) for rows in split[:, rank] if rows],
        "even share": [int(load.sum() // RANKS)],
    }
    rows = {name: sum(groups) for name, groups in cases.items()}
    assert rows["slowest with replicas"] < 1.1 * rows["even share"] < rows["slowest without replicas"] / 2
    for name, groups in cases.items():
        took = {}
        for way, call in _experts(groups, hidden, size, place).items():
            try:
                took[way] = _timed(call, device)[1]
            except Exception:  # rows that a grouped product does not take
                if way == ALONE:
                    raise
        way = min(took, key=lambda way: took[way])
        times = f", {ALONE} {took[ALONE]:.2f} ms, {way} {took[way]:.2f} ms" if took[way] else ""
        notes.figure(f"{name}: {rows[name]} rows{times}")


def moe_layer(device: str, notes: Notes) -> None:
    """Milliseconds of an MoE layer forward and backward, balanced beside Megatron-LM's own, as one of eight ranks with
    its messages stubbed; by products of experts. Goals: 1.05 without replicas, 1.15 with two."""
    from benchmarks.host.layers import Sizes, expert_ranks
    from benchmarks.host.layers import moe_layer as layer

    local_device(device)
    # One of Qwen3-30B-A3B
    sizes = Sizes(2048, 768, 4096, 8, 16, torch.bfloat16) if device == "cuda" else Sizes()
    with expert_ranks(RANKS, device):
        own = _timed(layer(RANKS, None, sizes, device=device)[0], device)
        notes.figure("Megatron-LM's" + _milliseconds(own))
        for gemm in ("megatron", "torch"):
            for full in (0, REPLICAS[-1]):
                found = _timed(layer(RANKS, full, sizes, device=device, gemm=gemm)[0], device)
                ratio = f", {found[1] / own[1]:.2f} times, goal {1.15 if full else 1.05}" if own[1] else ""
                notes.figure(f"balanced, products {gemm}, {full} replicas{_milliseconds(found)}{ratio}")


def _milliseconds(took: tuple[float, float]) -> str:
    return f": host {took[0]:.2f} ms, device {took[1]:.2f} ms" if took[1] else ""

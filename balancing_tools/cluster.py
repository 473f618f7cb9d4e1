"""Measurement of compute and link speeds, and the command line of `python -m balancing.cluster`.

    python -m balancing.cluster --measure                                              one process: matmul and memory
    torchrun --nproc-per-node 8 -m balancing.cluster --measure --json cluster.json     and the bandwidth in a node
    torchrun --nnodes 2 ... -m balancing.cluster --measure --json cluster.json         and the bandwidth of a NIC
    python -m balancing.cluster --preset h200-8x400g --nodes 4                         what a preset says

All ranks multiply at the same time, as in training, so the figure includes the effect of shared cores, power and
clocks. Bandwidth is one direction between one pair of ranks while the other ranks are idle. Bandwidths that these ranks
cannot measure are written as null and printed as not measured. Latencies that they cannot measure keep their defaults;
the output names those that were measured.

Rates by length (`balancing.cluster.rates`) are those of the first rank. Attention runs through PyTorch's
scaled_dot_product_attention on documents of one length, with each backend that the device has, and products of experts
in each way that it has: one after the other, by Transformer Engine and by PyTorch's grouped product. What an operation
of the engine of sequences costs the host is not measured here: it stays that of `presets.H100`. The GPU's part has not
run on a GPU.
"""

import argparse
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch.nn.attention import SDPBackend, sdpa_kernel

from balancing.cluster import PRESETS, Cluster
from balancing.cluster.measured_links import gather_values, measure_links, seconds_now
from balancing.cluster.presets import H100
from balancing.cluster.rates import (
    AttentionPoint,
    KernelPoints,
    ProductPoints,
    Rates,
    attention_curve,
    causal_pairs,
    product_curve,
)
from balancing.command_line import Parser, whole_number
from balancing.files import check_output
from balancing.kernels.expert_choice import GEMMS, TITLES, Gemm
from balancing.launch import detect_launch, detect_nics, host_memory

__all__ = [
    "launch_latency",
    "main",
    "matmul_rate",
    "measure",
    "measure_rates",
]

_TIMEOUT = timedelta(minutes=2)  # of each wait; the whole measurement takes seconds
_REPEATS = 7
_LAUNCHES = 200  # a latency is the mean of as many


class _Sizes(NamedTuple):
    """What is measured for `Rates`. documents: tokens of a document. rows: of a group. heads, head: of attention.
    width: of products. copied: bytes."""

    documents: tuple[int, ...]
    rows: tuple[int, ...]
    heads: int
    head: int
    width: int
    copied: int
    dtype: torch.dtype


_ON_CUDA = _Sizes((128, 512, 2048, 8192, 32768), (512, 2048, 8192), 32, 128, 4096, 2**28, torch.bfloat16)
_ON_CPU = _Sizes((128, 512, 2048), (32, 128, 512), 2, 64, 256, 2**24, torch.float32)
_BACKENDS = {"fa2": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
_GROUPS = 16  # whose products are started one by one


class _Rank(NamedTuple):
    """The facts that ranks exchange before the measurement."""

    local_rank: int
    ranks_per_node: int
    nics_per_node: int
    host: str


def matmul_rate(device: torch.device) -> tuple[float, str]:
    """FLOP/s of a large matrix product on `device`, the median of repeats, and a description of the product."""
    size, dtype = (8192, torch.bfloat16) if device.type == "cuda" else (1024, torch.float32)
    # Random values: with constant values a GPU draws less power and therefore clocks higher.
    left, right = (torch.randn(size, size, device=device, dtype=torch.float32).to(dtype) for _ in range(2))
    out = torch.empty(size, size, device=device, dtype=dtype)
    seconds = []
    for _ in range(_REPEATS + 2):
        begin = seconds_now(device)
        torch.mm(left, right, out=out)
        seconds.append(seconds_now(device) - begin)
    rate = 2 * size**3 / statistics.median(seconds[2:])  # the first two set up libraries and clocks
    return rate, f"{size} x {size} x {size}, {str(dtype).removeprefix('torch.')}"


def launch_latency(device: torch.device) -> tuple[float, float]:
    """Seconds of the smallest kernel on a CUDA device, and seconds that the host takes to start it from Python.

    Both are medians of repeats. The device is kept busy while the host starts kernels, so that neither waits for the
    other.
    """
    tiny = torch.zeros(32, device=device)
    of_device, of_host = [], []
    for _ in range(_REPEATS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize(device)
        torch.cuda._sleep(50_000_000)  # cycles, about 30 ms
        begin.record()
        start = time.perf_counter()
        for _ in range(_LAUNCHES):
            tiny[:16].add_(1.0)  # with slicing, as in most operations
        of_host.append((time.perf_counter() - start) / _LAUNCHES)
        end.record()
        torch.cuda.synchronize(device)
        of_device.append(begin.elapsed_time(end) / 1e3 / _LAUNCHES)
    return statistics.median(of_device), statistics.median(of_host)


def measure_rates(device: torch.device) -> Rates:
    """Rates of this device by length and by rows.

    A longer document counts as at least as fast as a shorter one. Raises RuntimeError if no attention backend runs.
    """
    sizes = _ON_CUDA if device.type == "cuda" else _ON_CPU
    kernels, errors = [], []
    for name, backend in _BACKENDS.items():
        if device.type != "cuda" and backend != SDPBackend.FLASH_ATTENTION:
            continue
        try:
            kernels.append((name, _attention_points(backend, sizes, device)))
        except RuntimeError as error:
            errors.append(f"{name}: {str(error).strip().splitlines()[0]}")
    if not kernels:
        raise RuntimeError(f"no backend of attention runs on {device}: {'; '.join(errors)}")
    products = dict(_products(sizes, device))
    payload, target = (torch.ones(sizes.copied, dtype=torch.uint8, device=device) for _ in range(2))
    return Rates(
        kernel=kernels[0][0],
        attention=tuple(kernels),
        gemm="te" if "te" in products else "sequential",
        products=tuple(products.items()),
        operation_seconds=H100.operation_seconds,
        post_seconds=H100.post_seconds,
        copy_bandwidth=sizes.copied / _median(lambda: target.copy_(payload), device),
        source=f"{device.type}, torch {torch.__version__}; operation_seconds and post_seconds: {H100.source}",
    )


def _attention_points(backend: SDPBackend, sizes: _Sizes, device: torch.device) -> KernelPoints:
    forward, backward = [], []
    for tokens in sizes.documents:
        shape = (sizes.documents[-1] // tokens, sizes.heads, tokens, sizes.head)
        q, k, v = (torch.randn(shape, device=device, dtype=sizes.dtype, requires_grad=True) for _ in range(3))
        flops = 4.0 * shape[0] * shape[1] * shape[3] * causal_pairs(tokens, tokens)

        def attend(q: torch.Tensor = q, k: torch.Tensor = k, v: torch.Tensor = v) -> torch.Tensor:
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(q, k, v, is_causal=True)

        out = attend()

        def back(out: torch.Tensor = out, inputs: tuple[torch.Tensor, ...] = (q, k, v)) -> None:
            torch.autograd.grad(out, inputs, out.detach(), retain_graph=True)

        forward.append((tokens, flops / _median(attend, device)))
        backward.append((tokens, 2.5 * flops / _median(back, device)))
    return KernelPoints(
        *(
            tuple(AttentionPoint(tokens, tokens, rate) for tokens, rate in _rising(found))
            for found in (forward, backward)
        )
    )


def _products(sizes: _Sizes, device: torch.device) -> Iterator[tuple[str, ProductPoints]]:
    """(name, points) of each way to multiply experts that the device has."""
    for name in GEMMS if device.type == "cuda" else ("sequential",):
        try:
            points = _rising([(rows, _product_rate(GEMMS[name], rows, sizes, device)) for rows in sizes.rows])
            started = 0.0 if name == "torch" else _started_seconds(GEMMS[name], sizes, device)
        except Exception:  # not installed, or not for this GPU
            if name == "sequential":
                raise
            continue
        yield name, ProductPoints(tuple(points), started)


def _product_rate(gemm: Gemm, rows: int, sizes: _Sizes, device: torch.device) -> float:
    """FLOP/s of products of experts with `rows` rows, forward."""
    groups, width = sizes.rows[-1] // rows, sizes.width
    inputs = torch.randn(groups * rows, width, device=device).to(sizes.dtype)
    run = gemm([torch.nn.Parameter(torch.randn(width, width, device=device).to(sizes.dtype)) for _ in range(groups)])
    return 2.0 * groups * rows * width**2 / _median(lambda: run(inputs, [rows] * groups), device)


def _started_seconds(gemm: Gemm, sizes: _Sizes, device: torch.device) -> float:
    """Seconds of the host to start one small product from Python, of three: forward, and two of the backward pass."""
    inputs = torch.randn(_GROUPS * 16, sizes.head, device=device).to(sizes.dtype).requires_grad_()
    size = sizes.head, sizes.head
    weights = [torch.nn.Parameter(torch.randn(size, device=device).to(sizes.dtype)) for _ in range(_GROUPS)]
    run = gemm(weights)

    def products() -> None:
        torch.autograd.grad(run(inputs, [16] * _GROUPS).sum(), (inputs, *weights))

    return _median(products, device) / (3 * _GROUPS)


def _median(action: Callable[[], object], device: torch.device) -> float:
    """Seconds of an action, the median of repeats; the first two set up libraries and clocks."""
    seconds = []
    for _ in range(_REPEATS + 2):
        begin = seconds_now(device)
        action()
        seconds.append(seconds_now(device) - begin)
    return statistics.median(seconds[2:])


def _rising(points: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """The points with each rate at least that of the point before: noise of the machine makes some fall."""
    best, found = 0.0, []
    for length, rate in points:
        best = max(best, rate)
        found.append((length, best))
    return found


def measure(device: torch.device) -> tuple[Cluster, dict[str, str]]:
    """Measure this machine with the ranks of the default process group, or with this process if there is no group.

    All ranks call this and return the same: the cluster, and notes on the measurement. A bandwidth that these ranks
    cannot measure is math.inf. Raises ValueError if the ranks do not fill equal nodes in order.
    """
    ranks = gather_values(_describe_rank())
    me = ranks[dist.get_rank()] if dist.is_initialized() else ranks[0]
    per_node = ranks[0].ranks_per_node
    for number, rank in enumerate(ranks):
        if rank.ranks_per_node != per_node or len(ranks) % per_node or rank.local_rank != number % per_node:
            raise ValueError(
                f"rank {number} is number {rank.local_rank} on a node of {rank.ranks_per_node}, in a job of "
                f"{len(ranks)} ranks with {per_node} on the first node; start the same number on each node, in order "
                "(torchrun does; for SLURM: --distribution=block)"
            )
    if device.type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory
        name = torch.cuda.get_device_name(device)
    else:
        memory = host_memory() // sum(rank.host == me.host for rank in ranks)
        name = f"CPU, {torch.get_num_threads()} thread(s) a rank"

    rate, product = matmul_rate(device)
    rates = gather_values(rate)
    speeds: dict[str, Any] = {"intra_node_bandwidth": math.inf, "nic_bandwidth": math.inf}
    speeds |= measure_links(per_node, ranks[0].nics_per_node, device)
    if device.type == "cuda":
        launch, host = launch_latency(device)
        speeds |= {"launch_seconds": max(gather_values(launch)), "host_seconds": max(gather_values(host))}
    cluster = Cluster(
        nodes=len(ranks) // per_node,
        ranks_per_node=per_node,
        nics_per_node=ranks[0].nics_per_node,
        flops=statistics.median(rates),
        memory=min(gather_values(memory)),
        rates=gather_values(measure_rates(device))[0],
        **speeds,
    )
    spread = f"slowest rank {_quantity(min(rates), 'FLOP/s')}, fastest {_quantity(max(rates), 'FLOP/s')}"
    backend = dist.get_backend() if dist.is_initialized() else "none"
    measured = sorted(name for name in speeds if name.endswith("_seconds"))
    return cluster, {
        "device": name,
        "matmul": f"{product}; {spread}",
        "process group": backend,
        "latencies": f"measured: {', '.join(measured) or 'none'}; the others are defaults",
        "torch": str(torch.__version__),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns an exit code of `balancing.command_line`."""
    parser = Parser(
        prog="python -m balancing.cluster", description="Describe the cluster that load balancing plans for."
    )
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--measure", action="store_true", help="measure this process, or all ranks under torchrun")
    action.add_argument("--preset", metavar="NAME", help=f"show a known machine: {', '.join(PRESETS)}")
    parser.add_argument("--nodes", type=whole_number(1, 10**6), metavar="N", help="nodes of the preset (default 1)")
    parser.add_argument("--json", metavar="FILE", help="also write a file for the flag --cluster FILE")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto", help="device to measure")

    def work(options: argparse.Namespace) -> None:
        if options.measure:
            parser.refuse_unused(options, "with --measure, which counts the nodes that run it", "--nodes")
        else:
            parser.refuse_unused(options, "with --preset", "--device")
        try:
            _show(options)
        except (ValueError, RuntimeError, OSError) as error:
            if isinstance(error, OSError) and "RANK" not in os.environ:  # an error of a file or of standard output
                raise
            first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise ValueError(f"rank {_rank()}: {first_line}" if "RANK" in os.environ else first_line) from error

    return parser.run(work, argv)


def _show(options: argparse.Namespace) -> None:
    if options.json and _rank() == 0:
        check_output(options.json)  # before the measurement, so that a bad path costs no time
    if options.preset:
        cluster = Cluster.preset(options.preset, nodes=options.nodes or 1)
        about = {"preset": options.preset, "speeds": "data sheet, times the fraction that large operations achieve"}
    else:
        cluster, about = _measure_here(options.device)
    if _rank() == 0:
        _print(cluster, about)
        if options.json:
            cluster.to_json(options.json, about=about)
            print(f"wrote {options.json}; use it with --cluster {options.json}")


def _measure_here(requested: str) -> tuple[Cluster, dict[str, str]]:
    """Join the launcher's process group, measure, and leave it."""
    if requested == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda was asked for, but torch finds no CUDA device; use --device cpu or auto")
    use_cuda = requested != "cpu" and torch.cuda.is_available()
    device = torch.device("cpu")
    if use_cuda:
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
        torch.cuda.set_device(device)
    if "RANK" not in os.environ:
        return measure(device)
    dist.init_process_group("nccl" if use_cuda else "gloo", timeout=_TIMEOUT, device_id=device if use_cuda else None)
    try:
        return measure(device)
    finally:
        dist.destroy_process_group()


def _describe_rank() -> _Rank:
    nics = max(1, len(detect_nics()))
    try:
        host = Path("/proc/sys/kernel/random/boot_id").read_text().strip()  # containers on one machine share it
    except OSError:
        host = os.uname().nodename
    if not dist.is_initialized():
        return _Rank(0, 1, nics, host)
    per_node = detect_launch().ranks_per_node
    return _Rank(int(os.environ.get("LOCAL_RANK", dist.get_rank() % per_node)), per_node, nics, host)


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))


def _quantity(value: float, unit: str) -> str:
    for factor, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
        if value >= factor:
            return f"{value / factor:.1f} {prefix}{unit}"
    return f"{value:.0f} {unit}"


def _of_rates(cluster: Cluster) -> list[tuple[str, str]]:
    if cluster.rates is None:
        return [("rates by length", "none: one rate for all")]
    rates, lines = cluster.rates, []
    for name, points in rates.attention:
        for way in ("forward", "backward"):
            curve = attention_curve(getattr(points, way))
            row = f"a row costs {curve.row:.0f} more keys, a piece {curve.piece:.0f} more pairs"
            lines.append((f"attention, {name}, {way}", f"{_quantity(curve.flops, 'FLOP/s')}; {row}"))
    for name, ways in rates.products:
        rows = product_curve(ways.rows)
        row = f"an expert costs {rows.group:.0f} more rows, and the host {ways.group_seconds * 1e6:.0f} us"
        lines.append((f"experts, {TITLES.get(name, name)}", f"{_quantity(rows.flops, 'FLOP/s')}; {row}"))
    host = f"{rates.operation_seconds * 1e6:.0f} us, a message {rates.post_seconds * 1e6:.0f} us"
    return [
        *lines,
        ("host, engine's operation", host),
        ("copies", _quantity(rates.copy_bandwidth, "B/s")),
        ("rates are", ("measured: " if rates.measured else "not measured here: ") + rates.source),
    ]


def _print(cluster: Cluster, about: dict[str, str]) -> None:
    def bandwidth(value: float, missing: str) -> str:
        return f"not measured ({missing})" if value == math.inf else _quantity(value, "B/s")

    table = Table(title="Cluster", title_justify="left", show_header=False)
    table.add_row("nodes x ranks", f"{cluster.nodes} x {cluster.ranks_per_node}")
    table.add_row("NICs per node", str(cluster.nics_per_node))
    table.add_row(
        "rank to rank in a node", bandwidth(cluster.intra_node_bandwidth, "needs two ranks in a node: torchrun")
    )
    table.add_row("one NIC", bandwidth(cluster.nic_bandwidth, "needs ranks on two nodes"))
    table.add_row("matmul per rank", _quantity(cluster.flops, "FLOP/s"))
    table.add_row("memory per rank", _quantity(cluster.memory, "B"))
    for name, value in (
        ("kernel launch", cluster.launch_seconds),
        ("message latency", cluster.message_seconds),
        ("host operation", cluster.host_seconds),
    ):
        table.add_row(name, f"{value * 1e6:.1f} us")
    table.add_section()
    for line in _of_rates(cluster):
        table.add_row(*line)
    table.add_section()
    for key, text in about.items():
        table.add_row(key, text)
    Console().print(table)

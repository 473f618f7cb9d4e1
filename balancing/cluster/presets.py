"""Rates of the presets' GPUs: points measured on an H100, and the same points scaled for GPUs that nobody measured.

Measured on 2026-11-26 on one NVIDIA H100 80GB HBM3, driver 580.159.04, torch 2.11.0, cuDNN 9.19, Transformer Engine
2.20.2, commit 7c0c1ac, bf16, head size 128, 32 heads and 8 key heads, 64k tokens a call (32k with one document)
(benchmarks/log/h100.md). `python -m benchmarks.costs` sets all measured rows beside these rates.

- fa2: FlashAttention 2 of torch. Planners assume it unless they are told another (`Cluster.with_kernel`).
- cudnn: cuDNN's fused attention over packed documents, as Transformer Engine calls it.
- fa3: FlashAttention 3, read by eye (+-3 %) from a figure of MagiAttention's documentation (cp_benchmark.md, H100,
  64 heads and 8 key heads). Points up to 4k tokens are estimates: they are packed calls of eight times as many tokens,
  whose lengths are not given.
- Products of experts of Mixtral 8x7B, Qwen3-30B-A3B and DeepSeek-V3, forward and backward. PyTorch's grouped product is
  one kernel. Transformer Engine's and SequentialMLP's start the product of each expert apart, in 48 and 58 us: 4.67 and
  5.56 ms for the six products of 16 fine experts. Their rates with few rows, where the host is slower, are PyTorch's.
  An H200 measured the same within 6 % on 2026-11-27, SequentialMLP's host 70 us. Planners assume Transformer Engine's
  unless they are told others (`Cluster.with_gemm`).
- The host: 14.3, 8.6 and 8.5 ms for the 132, 84 and 84 operations that `balancing.sequences.rounds` counted for a layer
  with `chunks` (8 turns), `zones` and `ring`. That engine started each message by itself. For the present one 104 us is
  derived, not measured on a GPU: the four measured plans differ in Python's work by 3.9 times and in launches by 2.5,
  and their times follow launches, 109 us each within 10 %, or 74 us and Python's work within 15 %. With either, the
  launches and the work of the present engine come to 81 to 119 us an operation (`python -m benchmarks.costs`). It has
  fewer: 23 for 132 with `chunks` on 8 ranks. NCCL starts a send and a receive in 104 us.
- Copies: 3.0 TB/s, on an H200 4.3.
"""

from functools import cache

from balancing.cluster.rates import AttentionPoint, KernelPoints, ProductPoints, Rates

__all__ = ["H100", "rates_of"]


def _documents(points: dict[int, float]) -> tuple[AttentionPoint, ...]:
    """Points of whole documents. points: TFLOP/s by tokens."""
    return tuple(AttentionPoint(tokens, tokens, rate * 1e12) for tokens, rate in points.items())


_FEW_ROWS = ((1820, 470.3e12), (2048, 491.1e12))

H100 = Rates(
    kernel="fa2",
    attention=(
        ("fa2", KernelPoints(_documents({128: 53.5, 1024: 192.2, 8192: 337.2, 32768: 352.9}),
                               _documents({128: 37.5, 1024: 177.3, 8192: 297.4, 32768: 314.4}))),
        ("cudnn", KernelPoints(_documents({128: 53.5, 1024: 340.0, 8192: 520.4, 32768: 543.4}),
                               _documents({128: 38.5, 1024: 237.6, 8192: 467.1, 32768: 507.6}))),
        ("fa3", KernelPoints(_documents({512: 357, 1024: 483, 2048: 543, 4096: 584, 32768: 680}),
                                _documents({512: 206, 1024: 318, 2048: 375, 4096: 425, 32768: 586}))),
    ),
    gemm="te",
    products=(
        ("sequential", ProductPoints((*_FEW_ROWS, (2731, 568.5e12), (4096, 585.9e12), (8192, 645.8e12)), 58e-6)),
        ("te", ProductPoints((*_FEW_ROWS, (2731, 563.6e12), (4096, 598.1e12), (8192, 626.5e12)), 48e-6)),
        ("torch", ProductPoints((*_FEW_ROWS, (2731, 577.9e12), (4096, 614.5e12), (8192, 577.6e12)))),
    ),
    operation_seconds=104e-6,
    post_seconds=52e-6,
    copy_bandwidth=3.0e12,
    source="one H100 80GB HBM3, 2026-11-26, commit 7c0c1ac; fa3: MagiAttention's cp_benchmark.md, read by eye",
)  # fmt: skip
_SHEET = 989.0  # TFLOP/s of an H100's data sheet, dense bf16
# FlashAttention 2 reaches 0.72 of large matrix products on an A800, where it reaches 0.45 on an H100.
_A800_ATTENTION = 0.72 / 0.45 * 312 / _SHEET


@cache
def rates_of(preset: str, tflops: float) -> Rates:
    """The rates of a preset of `balancing.cluster.PRESETS`. tflops: of its data sheet."""
    gpu = preset.partition("-")[0]
    if gpu == "h100":
        return H100
    if gpu in ("h800", "h200"):
        memory = 4.3 / 3.0 if gpu == "h200" else 1.0
        return H100.times(1.0, f"an {gpu.upper()} has the same chip as: {H100.source}", memory=memory)
    attention = _A800_ATTENTION if gpu == "a800" else None
    memory = (2.0 if gpu == "a800" else 8.0) / 3.35  # TB/s of the data sheets' memory
    how = f"scaled by data sheets ({tflops:g} of {_SHEET:g} TFLOP/s), not measured, from: {H100.source}"
    return H100.times(tflops / _SHEET, how, attention=attention, memory=memory)

"""Every kernel of attention that a device has, in the precision it is used in, against float64 on the host; so merges
of partial results and sums of gradients."""

from collections.abc import Iterator

import torch

from balancing.kernels import merging
from balancing.kernels.base import CPU, PRODUCTS, Kernel, Pieces, accumulation_dtype, merge
from balancing.kernels.choice import choose_kernel, kernels_of_gpu
from balancing.kernels.trial import AttentionHeads
from tests.gpu.trial import Notes

SCALE = 0.2
HEADS = 4
BATCHES = {
    "one sequence": Pieces((257,), (257,), True),
    "ragged": Pieces((130, 1, 67), (200, 1, 67), True),
    "single tokens": Pieces((1, 1, 1), (1, 9, 3), True),
    "single tokens, all keys": Pieces((1, 1, 1), (5, 9, 3), False),
    "many sequences": Pieces((3,) * 600, (5,) * 600, True),  # to which cuDNN's kernel adds empty ones
    "keys of others": Pieces((96, 33), (64, 160), False),
    "windows": Pieces((130, 1, 67, 257), (200, 1, 67, 257), True, 64),
}
# Relative, in norm, of a result that is rounded to bf16 from sums of products of which one factor is rounded, too.
TOLERANCE = {torch.bfloat16: 1e-2, torch.float32: 1e-5}


def _kernels(device: str) -> Iterator[tuple[str, Kernel, torch.dtype, tuple[int, ...]]]:
    """(name, kernel, type, head sizes) of what may be chosen here."""
    yield "matrix products", PRODUCTS, torch.float32, (64,)
    if device == "cpu":
        yield "torch's for CPUs", CPU, torch.bfloat16, (64,)
        return
    for name, title, kernel in kernels_of_gpu(torch.device(device)):
        yield title, kernel, torch.bfloat16, (64, 128, 256) if name in ("fa2", "flash-attn") else (64, 128)


def _inputs(pieces: Pieces, kv_heads: int, place: torch.device, dtype: torch.dtype, size: int) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(1)
    q, grad = (torch.randn(sum(pieces.queries), HEADS, size, generator=draw) for _ in range(2))
    kv = torch.randn(sum(pieces.keys), 2, kv_heads, size, generator=draw)
    q, kv, grad = (x.to(device=place, dtype=dtype) for x in (q, kv, grad))
    return [q, kv[:, 0], kv[:, 1], grad]  # keys and values lie beside each other, as in the engine's workspace


def _reference(inputs: list[torch.Tensor], pieces: Pieces) -> list[torch.Tensor]:
    """Output and gradients in float64, on the host."""
    *qkv, grad = (x.cpu().double() for x in inputs)
    out, logsumexp = PRODUCTS.forward(*qkv, pieces, SCALE)
    return [out, *PRODUCTS.backward(grad, *qkv, out, logsumexp, pieces, SCALE)]


def _error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.cpu().double() - wanted).norm() / wanted.norm().clamp_min(1e-30))


def _merged(kernel: Kernel, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Attention of a sequence whose keys come in three parts: the first two are seen by all queries, the last is cut
    from the diagonal."""
    q, k, v, grad = inputs
    tokens = len(q) // 3
    rows = slice(2 * tokens, 3 * tokens)
    parts = [(slice(0, tokens), False), (slice(tokens, 2 * tokens), False), (rows, True)]
    total: tuple[torch.Tensor, torch.Tensor] | None = None
    for keys, causal in parts:
        out, logsumexp = kernel.forward(q[rows], k[keys], v[keys], Pieces((tokens,), (tokens,), causal), SCALE)
        wide = out.to(accumulation_dtype(q.dtype)), logsumexp
        total = wide if total is None else merge(*total, *wide)
    assert total is not None
    out, logsumexp = total[0].to(q.dtype), total[1]
    dq = torch.zeros_like(q[rows], dtype=torch.float32)
    dkv = []
    for keys, causal in parts:
        pieces = Pieces((tokens,), (tokens,), causal)
        of_q, *of_keys = kernel.backward(grad[rows], q[rows], k[keys], v[keys], out, logsumexp, pieces, SCALE)
        dq += of_q
        dkv.append(of_keys)
    return [out, dq, *(torch.cat(part) for part in zip(*dkv, strict=True))]


def kernel_parity(device: str, notes: Notes) -> None:
    """Errors of every kernel, the pieces that one refuses, and the choice by time, with the rate of each."""
    place = torch.device(device)
    for name, kernel, dtype, sizes in _kernels(device):
        worst, refused = 0.0, set()
        for size in sizes:
            for kv_heads in (HEADS, 2, 1):
                for batch, pieces in BATCHES.items():
                    inputs = _inputs(pieces, kv_heads, place, dtype, size)
                    q, k, v, grad = inputs
                    try:
                        out, logsumexp = kernel.forward(q, k, v, pieces, SCALE)
                        gradients = kernel.backward(grad, q, k, v, out, logsumexp, pieces, SCALE)
                    except Exception as error:  # which the engine leaves to the next kernel
                        refused.add(f"{batch} ({type(error).__name__})")
                        continue
                    assert logsumexp.shape == (HEADS, len(q)) and logsumexp.dtype is torch.float32
                    where = f"{name}, {batch}, head {size}, {kv_heads} kv heads"
                    worst = max(worst, _worst([out, *gradients], inputs, pieces, where))
                whole = Pieces((64,), (192,), True)
                inputs = _inputs(Pieces((192,), (192,), True), kv_heads, place, dtype, size)
                q, k, v, grad = inputs
                wanted = _reference([q[128:], k, v, grad[128:]], whole)
                for one, other in zip(_merged(kernel, inputs), wanted, strict=True):
                    assert _error(one, other) <= 2 * TOLERANCE[dtype], f"{name}, merged, head {size}"
        assert not refused or kernel is not PRODUCTS
        notes.figure(f"{name}: {worst:.1e}" + (f", refuses {', '.join(sorted(refused))}" if refused else ""))
    notes.figure(f"values of another size: {_with_other_values(place):.1e}")
    _check_determinism(device)
    notes.figure("deterministic where torch is asked for that")
    for heads in ((32, 8, 128, 128), (32, 32, 128, 128), (16, 16, 192, 128)):
        notes.figure(choose_kernel(place, AttentionHeads(torch.bfloat16, *heads, window=True)).line)


def _worst(found: list[torch.Tensor], inputs: list[torch.Tensor], pieces: Pieces, where: str) -> float:
    """The largest error of output and gradients, each of which must be within the tolerance of the inputs' type."""
    # Where each query sees one key, the gradients of scores are zero but for rounding.
    wanted = _reference(inputs, pieces)
    scale, worst = max(float(part.norm()) for part in wanted), 0.0
    for what, one, other in zip(("out", "dq", "dk", "dv"), found, wanted, strict=True):
        error = float((one.cpu().double() - other).norm()) / max(float(other.norm()), 1e-2 * scale)
        assert error <= TOLERANCE[inputs[0].dtype], f"{what}, {where}"
        worst = max(worst, error)
    return worst


def _with_other_values(place: torch.device) -> float:
    """Heads of queries and keys and of values as in multi-latent attention (192 and 128), and smaller ones."""
    worst = 0.0
    for size, values in ((192, 128), (48, 64)):
        kernel = choose_kernel(place, AttentionHeads(torch.bfloat16, HEADS, HEADS, size, values, True)).kernel
        for batch, pieces in BATCHES.items():
            q, k, *_ = _inputs(pieces, HEADS, place, torch.bfloat16, size)
            *_, v, grad = _inputs(pieces, HEADS, place, torch.bfloat16, values)
            out, logsumexp = kernel.forward(q, k, v, pieces, SCALE)
            found = [out, *kernel.backward(grad, q, k, v, out, logsumexp, pieces, SCALE)]
            worst = max(worst, _worst(found, [q, k, v, grad], pieces, f"{batch}, heads of {size} and {values}"))
    return worst


def _check_determinism(device: str) -> None:
    """Where torch is asked for deterministic algorithms, the kernel that is chosen gives the same bits twice."""
    pieces, place = BATCHES["ragged"], torch.device(device)
    q, k, v, grad = _inputs(pieces, 2, place, torch.bfloat16, 128)
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        kernel = choose_kernel(place, AttentionHeads(torch.bfloat16, HEADS, 2, 128, 128)).kernel
        out, logsumexp = kernel.forward(q, k, v, pieces, SCALE)
        first, second = (kernel.backward(grad, q, k, v, out, logsumexp, pieces, SCALE) for _ in range(2))
    finally:
        torch.use_deterministic_algorithms(before)
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def merges_and_sums(device: str, notes: Notes) -> None:
    """With adjacent rows and with listed ones. On a GPU the fused kernels must be those that are chosen."""
    place, draw = torch.device(device), torch.Generator().manual_seed(0)
    merge_rows, add_rows = merging.choose_merge(place), merging.choose_add(place)
    assert (device == "cuda") == (merge_rows is not merging.merge_rows) == (add_rows is not merging.add_rows)
    worst = {"merge": 0.0, "sum": 0.0}
    for rows in (slice(3, 40), torch.randperm(50, generator=draw)[:37].int()):
        there = rows if isinstance(rows, slice) else rows.to(place)
        for size in (64, 128):
            out, more, more_lse = (torch.randn(*s, generator=draw) for s in ((50, 3, size), (37, 3, size), (3, 37)))
            lse, kept = 8 * torch.randn(3, 50, generator=draw), 8 * more_lse
            more = more.bfloat16()
            found = [x.to(place, copy=True) for x in (out, lse)]
            merge_rows(*found, more.to(place), kept.to(place), there)
            exact = [x.double() for x in (out, lse)]
            merging.merge_rows(*exact, more.double(), kept.double(), rows)
            worst["merge"] = max(worst["merge"], *map(_error, found, exact))
            found = [out.to(place, copy=True)]
            add_rows(found[0], there, (more.to(place),))
            exact = [out.double()]
            merging.add_rows(exact[0], rows, (more.double(),))
            worst["sum"] = max(worst["sum"], *map(_error, found, exact))
    assert max(worst.values()) <= 1e-6
    notes.figure(", ".join(f"{name}: {error:.1e}" for name, error in worst.items()))

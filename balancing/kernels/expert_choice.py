"""The faster way to multiply the experts of a rank, chosen by measurement.

There are two: the products of the model's own modules, one expert after the other (SequentialMLP) or grouped by
Transformer Engine, and PyTorch's grouped product (`balancing.kernels.expert_products`). The latter is compared with
float64 on few rows, some experts having none, forward and backward, with NaN in the memory that results get. Then each
multiplies the two linear layers of experts of the job's sizes. All ranks take the largest of their times, so they
choose the same. The own products stay unless the others are clearly faster.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from balancing.kernels.choice import CLEARLY, KernelError, in_one_line, largest
from balancing.kernels.expert_products import grouped_linear, torch_product
from balancing.kernels.trial import TOLERANCE, in_any_order, leave_nan, seconds_of

__all__ = ["GEMMS", "TITLES", "ExpertSizes", "Gemm", "GemmChoice", "choose_among_gemms", "choose_gemm"]

# Names of products, as in `Rates.products` -> what they stand for. The first two are those of a model's own modules.
TITLES = {
    "sequential": "one expert after the other",
    "te": "grouped by Transformer Engine",
    "torch": "grouped by PyTorch",
}
_FEW = (7, 0, 130, 1, 64)  # rows of experts in the comparison
_MOST_BYTES = 2**30  # of weights that are timed; experts so large that fewer are as good take as long by each product
_LARGEST_COMPARED = 2048  # width of a weight in the comparison


class ExpertSizes(NamedTuple):
    """What products are chosen for.

    dtype: of weights and rows.
    hidden, ffn_hidden: widths of an expert on one rank.
    gated: whether there is a third matrix, as in SwiGLU.
    experts: that a rank computes, homes and slots.
    rows: of a rank and micro-batch.
    """

    dtype: torch.dtype
    hidden: int
    ffn_hidden: int
    gated: bool
    experts: int
    rows: int

    @property
    def layers(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """(in, out) of the two linear layers."""
        return (self.hidden, (1 + self.gated) * self.ffn_hidden), (self.ffn_hidden, self.hidden)

    @property
    def flops(self) -> float:
        """Of both, forward and backward."""
        return 6.0 * self.rows * sum(width * out for width, out in self.layers)


class GemmChoice(NamedTuple):
    """The chosen products.

    name: in `TITLES`.
    line: for the user.
    rates: name -> FLOP/s of each that was timed, forward and backward.
    recorded: what a checkpoint keeps: the name, if it was measured, which may end otherwise the next time.
    """

    name: str
    line: str
    rates: Mapping[str, float] = {}
    recorded: str | None = None


# weights [expert] -> [out, in] -> a differentiable function of rows [row, in] and of rows of each expert
Gemm = Callable[[Sequence[torch.Tensor]], Callable[[torch.Tensor, list[int]], torch.Tensor]]


def choose_gemm(
    device: torch.device,
    sizes: ExpertSizes,
    own: str,
    wanted: str = "auto",
    *,
    why_own: str = "",
    had: str | None = None,
) -> GemmChoice:
    """The products for experts of these sizes. All ranks of the job call it together.

    own: name of the products of the model's own modules.
    wanted: "auto"; "megatron" for the model's own; "torch".
    why_own: why these modules cannot have others, on this rank; empty if they can.
    had: the name that a resumed run had. It is taken if `wanted` does not exclude it and it runs here.

    Raises KernelError on all ranks if "torch" is wanted and does not run on all of them. Without a GPU "auto" is the
    model's own.
    """
    if wanted == "megatron" or (wanted == "auto" and device.type != "cuda"):
        return GemmChoice(own, f"experts: {TITLES[own]}")
    if device.type == "cuda" and (why := _why_not_torch(sizes)):  # on all ranks
        if wanted == "torch":
            raise KernelError(_not_here(wanted, why))
        return GemmChoice(own, f"experts: {TITLES[own]}; {TITLES['torch']} left out: {why}")
    return choose_among_gemms({own: GEMMS[own], "torch": GEMMS["torch"]}, device, sizes, wanted, why_own, had)


def choose_among_gemms(
    gemms: Mapping[str, Gemm],
    device: torch.device,
    sizes: ExpertSizes,
    wanted: str = "auto",
    why_own: str = "",
    had: str | None = None,
) -> GemmChoice:
    """As `choose_gemm`, of products by name. The first are those of the model's own modules, which need no comparison
    to be taken."""
    own = next(iter(gemms))
    wrong = {name: "" if name == own else why_own or _wrong(gemm, device, sizes) for name, gemm in gemms.items()}
    named, kept = [*gemms] if wanted == "auto" else [wanted], []
    costs = _costs(gemms, [name for name in named if not wrong[name]], device, sizes)
    chosen = next((name for name in named if costs[name] < math.inf), None)
    if chosen is None:
        if wanted != "auto":
            raise KernelError(_not_here(wanted, wrong[wanted] or "not on all ranks"))
        chosen = own  # too little memory for a trial
    for name in named:
        if costs[name] < CLEARLY * costs[chosen]:
            chosen = name
    if had in named and wanted == "auto" and costs[had] < math.inf:
        chosen, kept = had, ["it is the checkpoint's"]
    rates = {name: sizes.flops / cost for name, cost in costs.items() if 0 < cost < math.inf}
    said = [f"{TITLES[name]}{_rate(rates, name)}" for name in [chosen, *(n for n in rates if n != chosen)]]
    left = [f"{TITLES[n]} left out: {wrong[n] or 'not on all ranks'}" for n in named if costs[n] == math.inf]
    line = f"experts: {'; '.join([*said, *left, *kept])}"
    return GemmChoice(chosen, line, rates, chosen if len(rates) > 1 else None)


def _costs(gemms: Mapping[str, Gemm], fit: Sequence[str], device: torch.device, sizes: ExpertSizes) -> dict[str, float]:
    """Name -> seconds on the slowest rank, infinite if some rank does not run it, and 0 if there is no other."""
    here = [
        (_seconds(gemms[name], device, sizes) if len(fit) > 1 else 0.0) if name in fit else math.inf for name in gemms
    ]
    return dict(zip(gemms, largest([here], device, None)[0], strict=True))


def _not_here(wanted: str, why: str) -> str:
    return f'experts.gemm "{wanted}" does not run here: {why}; use "auto"'


def _rate(rates: Mapping[str, float], name: str) -> str:
    return f", {rates[name] / 1e12:.0f} TFLOP/s" if name in rates else ""


def _why_not_torch(sizes: ExpertSizes) -> str:
    """Why PyTorch's grouped product takes no experts of these sizes on a GPU; empty if it does."""
    if sizes.dtype is not torch.bfloat16:
        return f"it has none of {sizes.dtype}"
    widths = {width for layer in sizes.layers for width in layer}
    odd = sorted(width for width in widths if width % 8)
    return f"its widths are multiples of 8, and experts have {odd[0]}" if odd else ""


# The products.


def _sequential(weights: Sequence[torch.Tensor]) -> Callable[[torch.Tensor, list[int]], torch.Tensor]:
    def run(rows: torch.Tensor, counts: list[int]) -> torch.Tensor:
        parts = zip(rows.split(counts), weights, strict=True)
        return torch.cat([torch.nn.functional.linear(part, weight) for part, weight in parts])

    return run


def _torch(weights: Sequence[torch.Tensor]) -> Callable[[torch.Tensor, list[int]], torch.Tensor]:
    return lambda rows, counts: grouped_linear(torch_product, rows, counts, weights)


def _transformer_engine(weights: Sequence[torch.Tensor]) -> Callable[[torch.Tensor, list[int]], torch.Tensor]:
    from transformer_engine.pytorch import GroupedLinear  # type: ignore[import-not-found]

    out, width = weights[0].shape
    options: dict[str, Any] = {"bias": False, "params_dtype": weights[0].dtype, "device": weights[0].device}
    layer = GroupedLinear(len(weights), width, out, **options)
    for number, weight in enumerate(weights):
        layer._parameters[f"weight{number}"] = weight
    return lambda rows, counts: layer(rows, counts)


GEMMS: dict[str, Gemm] = {"sequential": _sequential, "te": _transformer_engine, "torch": _torch}


# The trial.


def _made_up(
    device: torch.device, dtype: torch.dtype, counts: Sequence[int], width: int, out: int
) -> tuple[torch.Tensor, torch.Tensor, list[torch.nn.Parameter]]:
    """Rows, a gradient of what they become, and weights."""
    draw = torch.Generator(device).manual_seed(1)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draw, device=device, dtype=torch.float32).to(dtype)

    rows, gradient = normal(sum(counts), width).requires_grad_(), normal(sum(counts), out)
    return rows, gradient, [torch.nn.Parameter(normal(out, width)) for _ in counts]


def _wrong(gemm: Gemm, device: torch.device, sizes: ExpertSizes) -> str:
    """Why products are left out; empty if they compute what float64 does."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    for width, out in sizes.layers:
        width, out = min(width, _LARGEST_COMPARED), min(out, _LARGEST_COMPARED)
        rows, gradient, weights = _made_up(device, sizes.dtype, _FEW, width, out)
        try:
            used = torch.stack([weight.detach() for weight, count in zip(weights, _FEW, strict=True) if count])
            leave_nan(gradient, rows.detach(), used, weights[0].detach())
            del used
            made = [_both(gemm(weights), rows, gradient, weights) for _ in range(1 + deterministic)]
        except Exception as failure:  # of whatever kind: it does not run
            return in_one_line(failure)
        exact = [weight.detach().double().requires_grad_() for weight in weights]
        with in_any_order():
            wanted = _both(_sequential(exact), rows.detach().double().requires_grad_(), gradient.double(), exact)
        for what, one, other in zip(_WHAT, made[0], wanted, strict=True):
            error, of = float((one.double() - other).norm()), float(other.norm())
            if not error <= TOLERANCE[sizes.dtype] * of:  # exactly zero for an expert without rows
                return f"its {what} differ by {error / (of or 1.0):.1e}"
        if not all(torch.equal(one, other) for again in made[1:] for one, other in zip(made[0], again, strict=True)):
            return "its gradients do not repeat bit for bit"
    return ""


_WHAT = (
    *(f"products of an expert with {count} rows" for count in _FEW),
    *(f"gradients of {count} rows" for count in _FEW),
    *(f"gradients of weights with {count} rows" for count in _FEW),
)


def _both(
    run: Callable[[torch.Tensor, list[int]], torch.Tensor],
    rows: torch.Tensor,
    gradient: torch.Tensor,
    weights: Sequence[torch.Tensor],
) -> list[torch.Tensor]:
    """Results forward and backward, by expert."""
    counts = [*_FEW]
    made = run(rows, counts)
    of_rows, *of_weights = torch.autograd.grad(made, [rows, *weights], gradient)
    return [*made.detach().split(counts), *of_rows.split(counts), *of_weights]


def _seconds(gemm: Gemm, device: torch.device, sizes: ExpertSizes) -> float:
    """Forward and backward through both linear layers, the last expert having three times the rows of the first;
    infinite if it fails."""
    total = 0.0
    for width, out in sizes.layers:
        experts = max(1, min(sizes.experts, _MOST_BYTES // (width * out * sizes.dtype.itemsize)))
        shares = torch.linspace(0.5, 1.5, experts) if experts > 1 else torch.ones(1)
        counts = [max(1, round(float(share) * sizes.rows / experts)) for share in shares]
        try:
            rows, gradient, weights = _made_up(device, sizes.dtype, counts, width, out)
            run = gemm(weights)

            def both() -> None:
                torch.autograd.grad(run(rows, counts), [rows, *weights], gradient)  # noqa: B023  (runs in this round)

            total += seconds_of(both, device)
        except Exception:  # such as too little memory
            return math.inf
    return total

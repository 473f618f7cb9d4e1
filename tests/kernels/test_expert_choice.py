"""Products of experts: PyTorch's grouped one against loops, and which is chosen, on stand-ins that are right, wrong or
slow. No device takes part."""

import pytest
import torch
from torch.nn.functional import linear

from balancing.kernels import expert_products, trial
from balancing.kernels.choice import KernelError
from balancing.kernels.expert_choice import GEMMS, ExpertSizes, choose_among_gemms, choose_gemm
from balancing.kernels.expert_products import grouped_linear, rows_of_biases, torch_product

CPU = torch.device("cpu")
SIZES = ExpertSizes(torch.float64, 16, 8, True, 4, 40)
NEAR = {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 2e-2}


def _leaves(counts, dtype):
    draw = torch.Generator().manual_seed(1)

    def normal(*shape):
        return torch.randn(*shape, generator=draw, dtype=torch.float64).to(dtype).requires_grad_()

    return normal(sum(counts), 16), [normal(8, 16) for _ in counts], [normal(8) for _ in counts]


@pytest.mark.parametrize("dtype", NEAR)
@pytest.mark.parametrize("counts", [(3, 0, 5, 1), (0, 0, 7, 0), (0, 0), (130, 1, 64)])
def test_grouped_linear_layers_are_those_of_each_expert(counts, dtype):
    rows, weights, biases = _leaves(counts, dtype)
    leaves = [rows, *weights, *biases]
    ours = grouped_linear(torch_product, rows, counts, weights) + rows_of_biases(torch_product, counts, biases)
    theirs = torch.cat([linear(*each) for each in zip(rows.split(counts), weights, biases, strict=True)])
    gradient = torch.linspace(-1, 1, ours.numel(), dtype=torch.float64).to(dtype).view_as(ours)
    pairs = [(ours, theirs)]
    pairs += zip(*(torch.autograd.grad(made, leaves, gradient) for made in (ours, theirs)), strict=True)
    for one, other in pairs:
        assert one.shape == other.shape and one.dtype == dtype
        one, other = one.detach().double(), other.detach().double()
        assert float((one - other).norm()) <= NEAR[dtype] * float(other.norm())


def test_experts_without_rows_and_frozen_ones_are_left_to_no_operator():
    """An operator that leaves groups without rows unwritten is never asked for them, so their gradients are zeros."""

    def product(left, right, groups):
        assert all(groups.rows) and len(groups.rows) == len(groups.ends)
        return torch_product(left, right, groups)

    rows, weights, _ = _leaves((0, 5, 0), torch.float64)
    weights[1].requires_grad_(False)
    made = grouped_linear(product, rows, (0, 5, 0), weights)
    made.sum().backward()
    assert torch.equal(weights[0].grad, torch.zeros(8, 16)) and torch.equal(weights[2].grad, torch.zeros(8, 16))
    assert weights[1].grad is None and torch.equal(rows.grad, weights[1].sum(0).expand(5, 16))


def test_a_torch_without_a_grouped_product_says_so(monkeypatch):
    monkeypatch.delattr(torch.nn.functional, "grouped_mm", raising=False)
    older, asked = torch_product, []
    monkeypatch.setattr(torch, "_grouped_mm", lambda *given, offs: asked.append(offs) or torch.zeros(1))
    rows, weights, _ = _leaves((2, 1), torch.float32)
    grouped_linear(older, rows, (2, 1), weights)
    assert asked[0].tolist() == [2, 3], "the older name is taken"
    monkeypatch.delattr(torch, "_grouped_mm")
    with pytest.raises(NotImplementedError, match="has no grouped product"):
        grouped_linear(torch_product, rows, (2, 1), weights)


class Clock:
    now = 0.0


@pytest.fixture
def clock(monkeypatch):
    monkeypatch.setattr(trial.time, "perf_counter", lambda: Clock.now)


def _slow(seconds, change=lambda made, rows, counts: made):
    """Right products that take so long, of which `change` makes others."""

    def gemm(weights):
        def run(rows, counts):
            Clock.now += seconds
            return change(GEMMS["sequential"](weights)(rows, counts), rows, counts)

        return run

    return gemm


def _choose(wanted="auto", had=None, why_own="", own=2.0, **more):
    gemms = {"sequential": _slow(own), "torch": more.pop("torch", _slow(1.0))}
    return choose_among_gemms(gemms, CPU, SIZES, wanted, why_own, had)


def test_the_fastest_is_taken_and_the_own_one_unless_another_is_clearly_faster(clock):
    choice = _choose()
    assert choice.name == choice.recorded == "torch"
    assert choice.rates["torch"] == pytest.approx(SIZES.flops / 2), "two layers of one second each"
    assert choice.line.startswith("experts: grouped by PyTorch, ") and "one expert after the other, " in choice.line
    assert _choose(own=1.01).recorded == "sequential"
    kept = _choose(own=9.0, had="sequential")
    assert kept.name == kept.recorded == "sequential" and kept.line.endswith("; it is the checkpoint's")
    assert _choose(had="te").name == "torch", "a name that this model does not have"


class _Altered(torch.autograd.Function):
    """The identity, whose gradient is altered."""

    @staticmethod
    def forward(ctx, weight, alter):
        ctx.alter = alter
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx, gradient):
        return ctx.alter(gradient), None


def _altered(alter):
    """Products whose gradients of weights are altered."""

    def gemm(weights):
        return GEMMS["sequential"]([_Altered.apply(weight, alter) for weight in weights])

    return gemm


def _fails(weights):
    raise RuntimeError("not for this GPU\nand more")


WRONG = {
    "one row of one expert": (
        _slow(1.0, lambda made, rows, counts: torch.cat([made[: counts[0]] * 1.1, made[counts[0] :]])),
        "its products of an expert with 7 rows differ by 1.0e-01",
    ),
    "garbage in gradients of experts without rows": (
        _altered(lambda gradient: gradient if gradient.any() else gradient + 1),
        "its gradients of weights with 0 rows differ by",
    ),
    "nothing in them": (
        _altered(lambda gradient: gradient if gradient.any() else gradient * torch.nan),
        "its gradients of weights with 0 rows differ by nan",
    ),
    "a product that is not there": (_fails, "RuntimeError not for this GPU"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_products_are_left_out(clock, case):
    gemm, why = WRONG[case]
    choice = _choose(torch=gemm)
    assert choice.name == "sequential" and choice.recorded is None
    assert f"grouped by PyTorch left out: {why}" in choice.line and "\n" not in choice.line
    assert _choose(torch=gemm, had="torch").name == "sequential", "not even for a checkpoint"
    with pytest.raises(KernelError, match=r'experts.gemm "torch" does not run here: .*; use "auto"$') as caught:
        _choose("torch", torch=gemm)
    assert why in str(caught.value)


def test_gradients_must_repeat_where_all_do(clock, monkeypatch):
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    noise = iter(1 + 1e-13 * number for number in range(100))
    assert "do not repeat bit for bit" in _choose(torch=_altered(lambda gradient: gradient * next(noise))).line
    assert _choose().name == "torch"


def test_products_that_the_modules_cannot_have_are_not_tried(clock):
    choice = _choose(why_own="weights are multiplied in 8 bits (fp8)", torch=_fails)
    assert choice.name == "sequential" and "left out: weights are multiplied in 8 bits (fp8)" in choice.line


def test_without_a_gpu_the_own_products_stay_and_nothing_is_measured(monkeypatch):
    monkeypatch.setattr(expert_products, "torch_product", None)
    for own in ("sequential", "te"):
        choice = choose_gemm(CPU, SIZES, own)
        assert (choice.name, choice.rates, choice.recorded) == (own, {}, None)
    assert choose_gemm(CPU, SIZES, "sequential", "torch").name == "torch"
    assert choose_gemm(torch.device("cuda"), SIZES, "te", "megatron").name == "te"


@pytest.mark.parametrize(
    "sizes, why",
    [
        (SIZES, "it has none of torch.float64"),
        (ExpertSizes(torch.bfloat16, 16, 12, False, 4, 40), "its widths are multiples of 8, and experts have 12"),
    ],
)
def test_experts_that_the_operator_does_not_take_are_not_tried_on_a_gpu(sizes, why):
    gpu = torch.device("cuda")
    choice = choose_gemm(gpu, sizes, "sequential")
    assert choice.name == "sequential" and choice.line.endswith(f"grouped by PyTorch left out: {why}")
    with pytest.raises(KernelError, match=why):
        choose_gemm(gpu, sizes, "sequential", "torch")

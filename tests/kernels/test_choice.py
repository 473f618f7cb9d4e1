"""Which kernel of attention is chosen, on stand-ins that are right, wrong, slow or picky; no device takes part."""

import itertools
import re
import warnings

import pytest
import torch

from balancing.cluster import Cluster
from balancing.kernels import base, trial
from balancing.kernels.base import PRODUCTS, OfOneSize, Pieces
from balancing.kernels.choice import KernelError, KernelsInTurn, _loads, choose_among, planned_kernels
from balancing.kernels.flash import TorchFlash
from balancing.kernels.trial import AttentionHeads
from balancing.sequences import AttentionShape, plan_sequences
from balancing.sequences.engine.compiler import compile_rank
from balancing.sequences.plan import METHODS
from balancing.sequences.sequence_plan import in_window
from tests.kernels.test_base import PIECES, _alone, _inputs

CPU = torch.device("cpu")
HEADS = AttentionHeads(torch.float64, 4, 2, 6, 6, True)


class Exact(base._Products):
    """Matrix products, as slow as told. seconds: of a call."""

    def __init__(self, seconds: float = 1.0) -> None:
        self.seconds, self.calls = seconds, 0

    def forward(self, q, k, v, pieces, scale):
        self._count()
        return super().forward(q, k, v, pieces, scale)

    def backward(self, grad, q, k, v, out, logsumexp, pieces, scale):
        self._count()
        return super().backward(grad, q, k, v, out, logsumexp, pieces, scale)

    def _count(self):
        self.calls += 1
        Clock.now += self.seconds


class Clock:
    now = 0.0


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    monkeypatch.setattr(trial.time, "perf_counter", lambda: Clock.now)
    monkeypatch.setattr(trial, "_LONG", 40)
    monkeypatch.setattr(trial, "_SHORT", (5, 5))


def _choose(wanted="auto", heads=HEADS, had=None, **kernels_by_name):
    def load(found):
        def loaded():
            if isinstance(found, Exception):
                raise found
            return f"the {found.seconds:g} s kernel", found

        return loaded

    loads = {name.replace("_", "-"): load(found) for name, found in kernels_by_name.items()}
    return choose_among(loads, CPU, heads, wanted, None, had)


def _check(kernel, sizes=(6, 6)):
    """That `kernel` computes attention of all kinds of pieces."""
    for pieces in PIECES:
        q, k, *_, grad = _inputs(pieces, 2, "cpu", torch.float64, sizes[0])
        *_, v, grad = _inputs(pieces, 2, "cpu", torch.float64, sizes[1])
        out, logsumexp = kernel.forward(q, k, v, pieces, 0.3)
        found = (out, *kernel.backward(grad, q, k, v, out, logsumexp, pieces, 0.3))
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        wanted = _alone(*leaves, pieces, 0.3)
        for one, other in zip(found, (wanted, *torch.autograd.grad(wanted, leaves, grad)), strict=True):
            torch.testing.assert_close(one, other.detach(), rtol=1e-12, atol=1e-12)


def test_the_fastest_is_chosen_and_the_line_says_the_others():
    fast, slow = Exact(0.1), Exact(0.4)
    choice = _choose(cudnn=slow, fa3=ModuleNotFoundError("no FA3"), fa4=RuntimeError("built for\nelse"), fa2=fast)
    assert choice.name == "fa2" and choice.rates["fa2"] == pytest.approx(4 * choice.rates["cudnn"])
    assert choice.line == (
        f"attention: the 0.1 s kernel, {choice.rates['fa2'] / 1e12:.0f} TFLOP/s; the 0.4 s kernel "
        f"{choice.rates['cudnn'] / 1e12:.0f}; FlashAttention 4: RuntimeError built for; not installed: FlashAttention 3"
    )
    fast.calls = slow.calls = 0
    _check(choice.kernel)
    assert (fast.calls, slow.calls) == (2 * len(PIECES), 0)


def test_of_equally_fast_kernels_the_first_is_chosen():
    for first, second, chosen in ((1.0, 0.99, "cudnn"), (1.0, 0.9, "fa2")):
        assert _choose(fa2=Exact(second), cudnn=Exact(first)).name == chosen


class _HalfWritten(Exact):
    """Leaves the gradients of the last keys as they were in memory."""

    def backward(self, grad, q, k, v, out, logsumexp, pieces, scale):
        dq, dk, dv = super().backward(grad, q, k, v, out, logsumexp, pieces, scale)
        unwritten = torch.empty_like(dv)
        unwritten[:-1] = dv[:-1]
        return dq, dk, unwritten


class _OwnSoftmax(Exact):
    """Recomputes the softmax backward, where it should take that of all keys."""

    def backward(self, grad, q, k, v, out, logsumexp, pieces, scale):
        logsumexp = super().forward(q, k, v, pieces, scale)[1]
        return super().backward(grad, q, k, v, out, logsumexp, pieces, scale)


class _TopLeft(Exact):
    """Causal from the top left."""

    def _forward(self, q, k, v, causal, window, scale):
        seen = len(q) if causal else len(k)
        return super()._forward(q, k[:seen], v[:seen], causal, window, scale)


class _SwapsSingles(Exact):
    """Gives logsumexps of one query a sequence with heads and rows swapped."""

    def forward(self, q, k, v, pieces, scale):
        out, logsumexp = super().forward(q, k, v, pieces, scale)
        if max(pieces.queries) == 1 and q.shape[1] > k.shape[1]:
            logsumexp = logsumexp.t().reshape(logsumexp.shape)
        return out, logsumexp


class _IgnoresWindows(Exact):
    def _forward(self, q, k, v, causal, window, scale):
        return super()._forward(q, k, v, causal, None, scale)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (_OwnSoftmax, "its gradients of (queries|keys|values) of causal pieces differ by"),  # by rounding
        (_TopLeft, "of causal pieces with more keys than queries differ by"),
        (_SwapsSingles, "its logsumexps of causal pieces, of one query each differ by"),
        (_IgnoresWindows, "of pieces with a window differ by"),
    ],
)
def test_a_kernel_that_computes_something_else_is_left_out(wrong, said):
    choice = _choose(cudnn=wrong(0.1), fa2=Exact(0.4))
    assert choice.name == "fa2" and "; the 0.1 s kernel left out: its" in choice.line and re.search(said, choice.line)
    assert "nan" not in choice.line
    _check(choice.kernel)


def test_memory_that_a_kernel_does_not_write_is_seen():
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)  # has torch fill new memory with NaN, as the check does on a GPU
    try:
        choice = _choose(cudnn=_HalfWritten(0.1), fa2=Exact(0.4))
    finally:
        torch.use_deterministic_algorithms(before)
    assert "left out: its gradients of values of causal pieces differ by inf" in choice.line and choice.name == "fa2"


class _AnotherOrder(Exact):
    """Adds in another order each time, as atomic operations do."""

    order = itertools.count()

    def backward(self, grad, q, k, v, out, logsumexp, pieces, scale):
        dq, dk, dv = super().backward(grad, q, k, v, out, logsumexp, pieces, scale)
        return dq * (1 + 1e-15 * (next(self.order) % 2)), dk, dv


@pytest.mark.parametrize("deterministic", [True, False])
def test_a_deterministic_run_takes_only_kernels_that_repeat(deterministic):
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(deterministic)
    try:
        choice = _choose(cudnn=_AnotherOrder(0.1), fa2=Exact(0.4))
    finally:
        torch.use_deterministic_algorithms(before)
    assert choice.name == ("fa2" if deterministic else "cudnn")
    assert ("left out: its gradients do not repeat bit for bit" in choice.line) is deterministic


class _NoWindows(Exact):
    def _forward(self, q, k, v, causal, window, scale):
        if window is not None:
            raise RuntimeError("no windows\nat all")
        return super()._forward(q, k, v, causal, window, scale)


def test_pieces_that_a_kernel_refuses_go_to_the_next():
    fast, slow = _NoWindows(0.1), Exact(0.4)
    choice = _choose(cudnn=fast, fa2=slow)
    assert choice.name == "cudnn" and choice.line.endswith(
        "; pieces with a window go to the 0.4 s kernel: RuntimeError no windows; pieces with a window, of one query "
        "each go to the 0.4 s kernel: RuntimeError no windows"
    )
    slow.calls = 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the line has said all
        _check(choice.kernel)
    assert slow.calls == 2 * sum(pieces.window is not None for pieces in PIECES)


class _Fails(Exact):
    """Fails in its third backward pass after the choice."""

    left: float = float("inf")

    def backward(self, grad, q, k, v, out, logsumexp, pieces, scale):
        self.left -= 1
        if self.left < 0:
            raise torch.OutOfMemoryError("no workspace")
        return super().backward(grad, q, k, v, out, logsumexp, pieces, scale)


def test_a_kernel_that_fails_in_a_step_leaves_the_rest_to_the_next():
    fails, slow = _Fails(0.1), Exact(0.4)
    choice = _choose(cudnn=fails, fa2=slow)
    fails.left, slow.calls = 2, 0
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _check(choice.kernel)
        _check(choice.kernel)
    said = [str(one.message) for one in caught]
    assert said[0] == (
        "attention: the 0.1 s kernel leaves pieces without a mask to the next kernel: OutOfMemoryError no workspace"
    )
    assert len(said) == len({*said}) and slow.calls
    assert not choice.kernel._kernels[0].refused  # type: ignore[attr-defined]  # memory may be free again


def test_with_no_other_kernel_matrix_products_are_left():
    choice = _choose(fa2=_NoWindows(0.1))
    assert choice.line.startswith("attention: the 0.1 s kernel; pieces with a window go to matrix products: ")
    _check(choice.kernel)


def test_tensors_with_offsets_of_more_than_32_bits_go_to_kernels_that_take_them(monkeypatch):
    class Large(Exact):
        def refusal(self, backward, q, k, v, pieces):
            return base.too_large(q, k, v)

    choice = _choose(cudnn=Large(0.1), fa2=Exact(0.4))
    row = torch.zeros(1, 2, 128, dtype=torch.bfloat16)
    fits, beyond = row.expand(2**22 - 1, 2, 128), row.expand(2**22, 2, 128)  # without memory
    assert not base.too_large(fits, fits, fits)
    assert base.too_large(row, beyond, beyond) == "2147483648 elements are more than 2147483647"
    assert base.too_large(row.expand(2**23, 2, 128), row, row)
    assert not base.refusal(OfOneSize(PRODUCTS), False, beyond, beyond, beyond, PIECES[0])
    assert base.refusal(OfOneSize(Large()), False, row, beyond, beyond, PIECES[0])
    monkeypatch.setattr(base, "_MOST_ELEMENTS", 100)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _check(choice.kernel)
    assert "leaves causal pieces to the next kernel: 168 elements are more than 100" in str(caught[0].message)


@pytest.mark.parametrize(("wanted", "name"), [("fa2", "fa2"), ("flash", "fa3"), ("fused", "cudnn"), ("auto", "cudnn")])
def test_a_setting_names_a_kernel_or_a_family(wanted, name):
    choice = _choose(wanted, cudnn=Exact(0.1), fa3=Exact(0.2), fa2=Exact(0.4))
    assert choice.name == name and isinstance(choice.kernel, KernelsInTurn)
    _check(choice.kernel)


def test_plans_before_the_choice_assume_what_is_there():
    assert planned_kernels() == planned_kernels("flash") == ("fa2",), "torch has it"
    assert planned_kernels("fused") == planned_kernels("fused", ("cudnn", "fa2")) == ("cudnn",)
    assert planned_kernels("auto", ("fa2", "cudnn")) == ("cudnn", "fa2") and planned_kernels("fa3", ("fa2",)) == (
        "fa3",
    )
    h100 = Cluster.preset("h100-8x400g")
    assert h100.with_kernel(*planned_kernels("auto", ("fa2", "cudnn"))).rates.kernel == "cudnn"
    assert h100.with_kernel(*planned_kernels("unfused")) == h100


@pytest.mark.parametrize(
    ("wanted", "found", "said"),
    [
        ("fused", ModuleNotFoundError("no"), "kernel fused does not run here: not installed: cuDNN by Transformer"),
        ("cudnn", _TopLeft(), "kernel cudnn does not run here: the 1 s kernel: its outputs of causal pieces with"),
        ("fa3", Exact(), "kernel fa3 does not run here: not for this GPU"),
    ],
)
def test_a_named_kernel_that_does_not_run_is_an_error(wanted, found, said):
    with pytest.raises(KernelError, match=said):
        _choose(wanted, cudnn=found, fa2=Exact())


class _OneSize(Exact):
    def forward(self, q, k, v, pieces, scale):
        if k.shape != v.shape:
            raise RuntimeError("not built for these sizes")
        return super().forward(q, k, v, pieces, scale)


@pytest.mark.parametrize(
    ("name", "kernel", "padded"),
    [("fa3", Exact(), False), ("fa3", _OneSize(), True), ("cudnn", Exact(), False), ("fa4", Exact(), True)],
)
def test_values_are_padded_only_where_a_kernel_needs_it(name, kernel, padded):
    choice = _choose(name, HEADS._replace(value_size=4), **{name: kernel})
    assert isinstance(choice.kernel._kernels[0].kernel, OfOneSize) is padded
    _check(choice.kernel, (6, 4))


def _rank(rank: int) -> tuple[str, list[str]]:
    """The choice of a rank: on each another kernel is the fastest, and on the second one is wrong."""
    trial._LONG, trial._SHORT = 40, (5, 5)
    trial.time.perf_counter = lambda: Clock.now  # type: ignore[assignment]
    seconds = [(0.1, 0.5), (0.7, 0.2)][rank]
    wrong = _TopLeft(0.01) if rank else Exact(0.01)
    picky = _NoWindows(seconds[1]) if rank else Exact(seconds[1])
    choice = _choose(cudnn=Exact(seconds[0]), flash_attn=picky, fa2=wrong)
    return choice.name, sorted(choice.kernel._kernels[0].refused)  # type: ignore[attr-defined]


def test_ranks_choose_the_same(pool):
    kinds = ["pieces with a window", "pieces with a window, of one query each"]
    assert pool.run(2, _choice_of_rank) == [("flash-attn", kinds)] * 2


def _choice_of_rank() -> tuple[str, list[str]]:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    try:
        return _rank(dist.get_rank())
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("major", "names"),
    [
        (8, ["cudnn", "flash-attn", "fa2"]),
        (9, ["cudnn", "fa3", "fa4", "flash-attn", "fa2"]),
        (10, ["cudnn", "fa4", "flash-attn", "fa2"]),
    ],
)
def test_the_kernels_that_are_tried_on_a_generation_of_gpus(major, names):
    assert [*_loads(major)] == names


def test_one_switch_of_torch_serves_kernels_in_turn(monkeypatch):
    """Each sets it to its own before it runs."""
    now = ["FA4"]
    monkeypatch.setattr(torch.nn.attention, "activate_flash_attention_impl", lambda impl: now.append(impl))
    monkeypatch.setattr(torch.nn.attention, "restore_flash_attention_impl", lambda _raise_warn=True: now.append(None))
    monkeypatch.setattr(torch.nn.attention, "current_flash_attention_impl", lambda: now[-1])
    three, two = TorchFlash("FA3"), TorchFlash()
    assert now == ["FA4", "FA3", None]
    for kernel in (three, three, two):
        kernel._switch()
    assert now == ["FA4", "FA3", None, "FA3", None]


def test_pieces_have_the_kinds_that_are_compared():
    """Whatever pieces there are, their kind is one of those."""
    known = {*trial.samples(HEADS)}
    for causal, window, queries, keys in itertools.product(
        (True, False), (None, 3), ((1, 1), (2, 1)), ((1, 1), (2, 1), (2, 2))
    ):
        if causal and any(q > k for q, k in zip(queries, keys, strict=True)):
            continue
        assert trial.kind_of(Pieces(queries, keys, causal, window if causal else None)) in known


@pytest.mark.parametrize(
    ("had", "wanted", "name", "said"),
    [
        ("cudnn", "auto", "cudnn", "; it is the checkpoint's"),
        ("fa2", "auto", "fa2", "; it is the checkpoint's"),
        ("fa3", "auto", "fa2", "; not the checkpoint's: attention kernel fa3 does not run here: not installed: Flash"),
        ("cpu", "auto", "fa2", ""),  # of a run on a CPU
        ("cudnn", "flash", "fa2", ""),  # which the flags of this run exclude
        ("cudnn", "fa2", "fa2", ""),
        (None, "auto", "fa2", ""),
    ],
)
def test_a_resumed_run_takes_the_kernel_that_it_had(had, wanted, name, said):
    """With the same kernels behind it, whatever is fast now."""
    window, slow, fast = _NoWindows(0.4), Exact(0.3), Exact(0.1)
    choice = _choose(wanted, had=had, cudnn=window, fa3=ModuleNotFoundError("no"), flash_attn=slow, fa2=fast)
    assert choice.name == name and said in choice.line
    assert ("checkpoint" in choice.line) is ("checkpoint" in said)
    order = [one.name for one in choice.kernel._kernels]
    assert (
        order
        == {
            "cudnn": ["cudnn", "flash-attn", "fa2", "products"],
            "fa2": ["fa2", "cudnn", "flash-attn", "products"],
        }[name]
    )


@pytest.mark.parametrize("method", METHODS)
def test_no_piece_is_without_queries_or_keys(method):
    """Kernels have had faults with such pieces, so programs have none, however short documents are."""
    cluster = Cluster.preset("h200-8x400g").relabel(nodes=2, ranks_per_node=2)
    shape = AttentionShape(32, 4, 2, 2, 64, window=3, windowed_layers=1)
    for lengths in ((1,) * 9, (1, 2, 40, 1), (64,), (5, 1, 3, 17, 2, 2)):
        plan = plan_sequences(lengths, cluster, shape=shape, method=method)
        for one, rank in itertools.product((plan, in_window(plan, 3)), range(4)):
            for call in compile_rank(one, rank).program.calls:
                assert min(call.pieces.queries + call.pieces.keys) > 0

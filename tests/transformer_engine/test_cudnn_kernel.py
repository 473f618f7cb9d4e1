"""cuDNN's packed attention as a kernel of the engine: Transformer Engine's own functions over matrix products that lay
tensors out as cuDNN does, against matrix products."""

import pytest


def _largest_differences(kv_heads: int, beside: bool, value_size: int, dtype: str) -> list[float]:
    """Of output, logsumexp and the three gradients, relative to the largest number, over all pieces."""
    import torch

    from balancing.kernels.base import PRODUCTS, Pieces, merge
    from balancing.kernels.cudnn import CudnnPacked
    from tests.kernels.test_base import PIECES, _inputs

    differences, kernel, of = [0.0] * 5, CudnnPacked(), getattr(torch, dtype)
    single = [Pieces((1, 1, 1), (1, 9, 3), True), Pieces((1, 1, 1), (2, 9, 3), False)]
    many = [Pieces((2,) * 700, (3,) * 700, True)]  # more than Transformer Engine rounds
    for pieces in [*PIECES, *single, *many]:
        q, *_ = _inputs(pieces, kv_heads, "cpu", of, 16)
        _, _, v, grad = _inputs(pieces, kv_heads, "cpu", of, value_size)
        kv = torch.randn(len(v), kv_heads, 16 + value_size, dtype=torch.float64).to(of)
        k, v = kv[..., :16], kv[..., 16:]
        if not beside:
            k, v = k.transpose(0, 1).contiguous().transpose(0, 1), v.contiguous()
        found, drawn = [], torch.get_rng_state()
        for one in (kernel, PRODUCTS):
            out, logsumexp = one.forward(q, k, v, pieces, 0.3)
            assert logsumexp.is_contiguous()
            # Backward gets results over more keys than those of the pieces, as from the engine.
            all_out, of_all = merge(out.to(logsumexp.dtype), logsumexp, out.flip(0).to(logsumexp.dtype), logsumexp + 1)
            found.append((out, logsumexp, *one.backward(grad, q, k, v, all_out.to(of), of_all, pieces, 0.3)))
        assert torch.equal(drawn, torch.get_rng_state()), "the model's generator has advanced"
        for number, (own, other) in enumerate(zip(*found, strict=True)):
            assert own.shape == other.shape and own.dtype is other.dtype
            difference = (own - other).abs().max() / other.abs().max()
            differences[number] = max(differences[number], difference.item())
    return differences


@pytest.mark.parametrize(
    ("kv_heads", "beside", "value_size", "dtype", "tolerance"),
    [
        (4, True, 16, "float64", 1e-12),
        (2, True, 16, "float64", 1e-12),
        (1, False, 16, "float64", 1e-12),
        (2, False, 8, "float64", 1e-12),
        (2, True, 24, "float64", 1e-12),
        (2, True, 16, "bfloat16", 2e-2),
    ],
)
def test_cudnn_is_called_as_it_wants(engine, kv_heads, beside, value_size, dtype, tolerance):
    (differences,) = engine.run(1, _largest_differences, kv_heads, beside, value_size, dtype)
    assert max(differences) <= tolerance


def _choice() -> tuple[str, str]:
    import torch

    from balancing.kernels import trial
    from balancing.kernels.choice import _cudnn, choose_among

    trial._LONG, trial._SHORT = 40, (5, 5)
    heads = trial.AttentionHeads(torch.float64, 4, 2, 8, 4, True)
    choice = choose_among({"cudnn": _cudnn}, torch.device("cpu"), heads)
    return choice.name, choice.line


def test_cudnn_passes_the_comparison_with_matrix_products(engine):
    """Pieces of every kind, windows and values of another size included."""
    assert engine.run(1, _choice) == [("cudnn", "attention: cuDNN 9.26 by Transformer Engine")]


def _plans() -> tuple[list[int], str, str]:
    import torch

    from balancing.kernels import cudnn
    from balancing.kernels.base import Pieces

    kernel, counts = cudnn.CudnnPacked(), []
    said = ""
    for tokens in (3, 500, 1024, 1025, 2000, 2048, 40_000, 50_000, 66_000):
        q, k = torch.zeros(tokens, 1, 1), torch.zeros(tokens, 1, 1)
        said += kernel.refusal(False, q, k, k, Pieces((tokens,), (tokens,), True))
        counts.append(len(kernel._plans))
    cudnn.MOST_PLANS = counts[-1]
    longer = torch.zeros(100_000, 1, 1)
    refused = kernel.refusal(False, longer, longer, longer, Pieces((100_000,), (100_000,), True))
    said += kernel.refusal(False, q, k, k, Pieces((66_000,), (66_000,), True))  # has its plan
    return counts, said, refused


def test_plans_are_rounded_counted_and_bounded(engine):
    ((counts, said, refused),) = engine.run(1, _plans)
    assert counts == [1, 1, 1, 2, 2, 2, 3, 3, 4] and not said
    assert refused == "cuDNN has 4 plans for other shapes"


def _of_other_versions() -> list[str]:
    import torch
    from transformer_engine.pytorch.cpp_extensions import fused_attn

    from balancing.kernels.cudnn import CudnnPacked
    from tests.kernels.test_base import PIECES, _inputs

    own, said = fused_attn.fused_attn_fwd, []

    def padded(*given, **named):
        out, (statistics, state) = own(*given, **named)
        return out, (statistics.transpose(0, 1)[None], state)

    def without_windows(is_training, max_seqlen_q, cu_seqlens_q):
        raise AssertionError("is not called")

    for function in (padded, without_windows):
        fused_attn.fused_attn_fwd = function
        q, k, v, _ = _inputs(PIECES[0], 2, "cpu", torch.bfloat16, 16)
        if function is padded:
            import functools

            fused_attn.fused_attn_fwd = functools.wraps(own)(padded)
        try:
            CudnnPacked().forward(q, k, v, PIECES[0], 0.3)
        except Exception as error:
            said.append(f"{type(error).__name__} {error}")
    fused_attn.fused_attn_fwd = own
    return said


def test_functions_and_statistics_of_other_versions_are_refused(engine):
    (said,) = engine.run(1, _of_other_versions)
    assert (
        said[0] == "RuntimeError cuDNN 9.26 gives statistics [1, 4, 7, 1] in torch.float32, not [7, 4, 1] in "
        "torch.float32"
    )
    assert said[1].startswith("TypeError without_windows takes no attn_bias_type, attn_mask_type, attn_scale, ")

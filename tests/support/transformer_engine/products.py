"""Matrix products of linear layers: one, or one for each expert.

cuBLAS counts columns first. With A a weight [out, in] and B rows of tokens, "TN" is the layer itself, "NN" the gradient
of its input and "NT" that of its weight: always op(B) op(A) in the order of torch.
"""

from collections.abc import Sequence
from typing import Any

import torch

from tests.support.transformer_engine.cpp_module import stands_in
from tests.support.transformer_engine.enums import TORCH_TYPE
from tests.support.transformer_engine.quantized import plain


def _product(a: Any, transa: bool, b: Any, transb: bool) -> torch.Tensor:
    """[rows, columns] in float32, in which kernels sum."""
    # A quantized factor is read along the dimension that is summed over.
    a, b = plain(a, columnwise=not transa).float(), plain(b, columnwise=transb).float()
    a, b = a.reshape(-1, a.shape[-1]), b.reshape(-1, b.shape[-1])
    return (b.t() if transb else b) @ (a.t() if transa else a)


def _put(product: torch.Tensor, out: torch.Tensor, accumulate: bool) -> None:
    product = product.view(out.shape)
    if accumulate:
        out.add_(product)
    else:
        out.copy_(product)


@stands_in
def generic_gemm(
    A: Any,
    transa: bool,
    B: Any,
    transb: bool,
    out: torch.Tensor | None,
    quantizer: Any,
    out_dtype: Any,
    bias: torch.Tensor | None,
    bias_type: Any,
    gelu: bool,
    gelu_in: torch.Tensor | None,
    grad: bool,
    workspace: torch.Tensor,
    workspace_size: int,
    accumulate: bool,
    use_split_accumulator: bool,
    *,
    comm_overlap: Any = None,
    comm_type: Any = None,
    extra_output: torch.Tensor | None = None,
    bulk_overlap: bool = False,
    alpha: float = 1.0,
    beta: float | None = None,
) -> tuple[Any, torch.Tensor | None, None, torch.Tensor | None]:
    """Output, gradient of the bias if `grad` and there is one, input of GELU, output of an overlapped message."""
    if comm_overlap is not None or gelu or quantizer is not None:
        raise NotImplementedError("generic_gemm stands in for a plain product: no overlap, GELU or quantized output")
    product = _product(A, transa, B, transb) * alpha
    bias_gradient = None
    if bias is not None and grad:
        rows = plain(B, columnwise=transb)
        bias_gradient = rows.reshape(-1, rows.shape[-1]).float().sum(0).to(bias.dtype)
    elif bias is not None:
        product = product + bias.float()
    if out is None:
        dtype = TORCH_TYPE[int(out_dtype)] if out_dtype is not None else A.dtype
        shape = product.shape if transb else (*B.shape[:-1], product.shape[-1])
        return product.to(dtype).view(shape), bias_gradient, None, extra_output
    _put(product, out, accumulate)
    return out, bias_gradient, None, extra_output


@stands_in
def te_general_grouped_gemm(
    A: Sequence[Any],
    transa: bool,
    B: Sequence[Any],
    transb: bool,
    D: Sequence[torch.Tensor],
    D_type: Any,
    m_splits: Sequence[int],
    bias: Sequence[torch.Tensor],
    bias_type: Any,
    single_output: bool,
    pre_gelu_out: Sequence[torch.Tensor],
    grad: bool,
    workspace: Sequence[torch.Tensor],
    workspace_size: int,
    accumulate: bool,
    use_split_accumulator: bool,
    math_sm_count: int,
) -> Sequence[torch.Tensor]:
    """One product for each group, into D. Returns the biases, which with `grad` become their gradients."""
    outputs = D[0].split([int(rows) for rows in m_splits]) if single_output else D
    for a, b, out, own_bias in zip(A, B, outputs, bias, strict=True):
        has_bias = bool(own_bias.numel())
        if out.numel():
            product = _product(a, transa, b, transb)
            if has_bias and not grad:
                product = product + own_bias.float()
            _put(product, out, accumulate)
        if has_bias and grad:
            own_bias.copy_(plain(b, columnwise=transb).float().sum(0))
    return bias

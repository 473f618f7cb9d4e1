"""SwiGLU times a weight of each token, as fused experts compute it between their two products."""

import torch
from torch.nn.functional import silu

from tests.support.transformer_engine.cpp_module import stands_in


def _halves(rows: torch.Tensor, glu_interleave_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Gate and linear part of rows [tokens, 2 x ffn], which may take turns every `glu_interleave_size` columns."""
    size = glu_interleave_size or rows.shape[-1] // 2
    gate, linear = rows.float().view(len(rows), rows.shape[-1] // (2 * size), 2, size).unbind(2)
    return gate.reshape(len(rows), rows.shape[-1] // 2), linear.reshape(len(rows), rows.shape[-1] // 2)


def _plain(quantizer: object) -> None:
    if quantizer is not None:
        raise NotImplementedError("quantized activations have no stand-in on the CPU")


@stands_in
def scaled_swiglu(
    input: torch.Tensor, scales: torch.Tensor, quantizer: object, glu_interleave_size: int
) -> torch.Tensor:
    _plain(quantizer)
    gate, linear = _halves(input, glu_interleave_size)
    return (silu(gate) * linear * scales.float().view(-1, 1)).to(input.dtype)


@stands_in
def scaled_dswiglu(
    grad_output: torch.Tensor,
    input: torch.Tensor,
    scales: torch.Tensor,
    quantizer: object,
    glu_interleave_size: int,
    compute_scale_grad: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Gradients of the input and of the scales."""
    _plain(quantizer)
    gate, linear = _halves(input, glu_interleave_size)
    gradient, scales_ = grad_output.float(), scales.float().view(-1, 1)
    sigmoid = gate.sigmoid()
    of_gate = gradient * scales_ * linear * sigmoid * (1 + gate * (1 - sigmoid))
    of_linear = gradient * scales_ * silu(gate)
    size = glu_interleave_size or input.shape[-1] // 2
    blocks = [part.view(len(input), input.shape[-1] // (2 * size), size) for part in (of_gate, of_linear)]
    of_input = torch.stack(blocks, 2).view(input.shape).to(input.dtype)
    of_scales = (gradient * silu(gate) * linear).sum(-1).view(scales.shape).to(scales.dtype)
    return of_input, of_scales if compute_scale_grad else None

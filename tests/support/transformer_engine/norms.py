"""LayerNorm and RMSNorm, forward and backward, computed in float32. Rows are [tokens, hidden]."""

from typing import Any

import torch

from tests.support.transformer_engine.cpp_module import stands_in
from tests.support.transformer_engine.enums import TORCH_TYPE


def _given(rows: torch.Tensor, out: torch.Tensor | None, quantizer: Any, otype: Any) -> Any:
    rows = rows.to(TORCH_TYPE[int(otype)])
    if quantizer is not None:
        rows = quantizer(rows)
    return rows if out is None else out.copy_(rows)


def _gradient_of_input(normed: torch.Tensor, rsigma: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """gradient: of `normed`, the input divided by its root mean square, 1 / `rsigma`."""
    return rsigma[:, None] * (gradient - normed * (gradient * normed).mean(-1, keepdim=True))


@stands_in
def rmsnorm_fwd(
    input: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    ln_out: torch.Tensor | None,
    quantizer: Any,
    otype: Any,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> tuple[Any, None, torch.Tensor]:
    rows = input.float()
    rsigma = torch.rsqrt(rows.square().mean(-1) + eps)
    out = rows * rsigma[:, None] * (weight.float() + zero_centered_gamma)
    return _given(out, ln_out, quantizer, otype), None, rsigma


@stands_in
def rmsnorm_bwd(
    dz: torch.Tensor,
    x: torch.Tensor,
    rsigma: torch.Tensor,
    gamma: torch.Tensor,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    gradient, normed = dz.reshape(x.shape).float(), x.float() * rsigma[:, None]
    of_input = _gradient_of_input(normed, rsigma, gradient * (gamma.float() + zero_centered_gamma))
    return of_input.to(x.dtype), (gradient * normed).sum(0).to(gamma.dtype)


@stands_in
def layernorm_fwd(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    eps: float,
    ln_out: torch.Tensor | None,
    quantizer: Any,
    otype: Any,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> tuple[Any, torch.Tensor, torch.Tensor]:
    rows = input.float()
    mean = rows.mean(-1)
    rsigma = torch.rsqrt(rows.var(-1, unbiased=False) + eps)
    normed = (rows - mean[:, None]) * rsigma[:, None]
    out = normed * (weight.float() + zero_centered_gamma) + bias.float()
    return _given(out, ln_out, quantizer, otype), mean, rsigma


@stands_in
def layernorm_bwd(
    dz: torch.Tensor,
    x: torch.Tensor,
    mu: torch.Tensor,
    rsigma: torch.Tensor,
    gamma: torch.Tensor,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    gradient, normed = dz.reshape(x.shape).float(), (x.float() - mu[:, None]) * rsigma[:, None]
    of_normed = gradient * (gamma.float() + zero_centered_gamma)
    of_normed = of_normed - of_normed.mean(-1, keepdim=True)
    of_input = _gradient_of_input(normed, rsigma, of_normed)
    return of_input.to(x.dtype), (gradient * normed).sum(0).to(gamma.dtype), gradient.sum(0).to(gamma.dtype)

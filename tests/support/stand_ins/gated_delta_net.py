"""What Megatron-LM's layers of Gated DeltaNet take from flash-linear-attention, whose kernels are for GPUs, in torch.

The gated delta rule is Megatron-LM's own, which it has for its deterministic mode.
"""

from typing import Any

import torch

__all__ = ["install"]


def install() -> None:
    """Have these layers work in this process, for good."""
    from megatron.core.ssm.gated_delta_net import common, gdn

    common.HAVE_FLA, common.l2norm = True, _unit
    gdn.causal_conv1d, gdn.chunk_gated_delta_rule = _causal_conv1d, common.torch_chunk_gated_delta_rule


def _unit(x: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """x [..., size] over its norm."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + eps)


def _causal_conv1d(x: torch.Tensor, weight: torch.Tensor, bias: Any, **unused: Any) -> tuple[torch.Tensor, None]:
    """SiLU of x [sample, token, channel] after a convolution of each channel with weight [channel, width]. Samples are
    one sequence each."""
    assert unused["cu_seqlens"] is None, "packed sequences are not separated here"
    width = weight.shape[1]
    padded = torch.nn.functional.pad(x.transpose(1, 2), (width - 1, 0))
    convolved = torch.nn.functional.conv1d(padded, weight.unsqueeze(1), bias, groups=len(weight))
    return torch.nn.functional.silu(convolved.transpose(1, 2)), None

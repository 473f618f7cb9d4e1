"""What Megatron-LM's layers of Gated DeltaNet take from flash-linear-attention, whose kernels are for GPUs, in torch.

The gated delta rule is Megatron-LM's own, which it has for its deterministic mode.
"""

from collections.abc import Sequence
from typing import Any

import torch

__all__ = ["install"]


def install() -> None:
    """Have these layers work in this process, for good."""
    from megatron.core.ssm.gated_delta_net import common, gdn

    def rule(*each: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, cu_seqlens: Any = None, **options: Any) -> Any:
        """The rule in each sequence: query, key, value [1, token, head, size], g, beta [1, token, head]."""
        parts = zip(*(_sequences(x, cu_seqlens) for x in (*each, g, beta)), strict=True)
        outputs = [
            common.torch_chunk_gated_delta_rule(*part[:3], g=part[3], beta=part[4], **options)[0] for part in parts
        ]
        return torch.cat(outputs, dim=1), None

    common.HAVE_FLA, common.l2norm = True, _unit
    gdn.causal_conv1d, gdn.chunk_gated_delta_rule = _causal_conv1d, rule


def _sequences(x: torch.Tensor, cu_seqlens: torch.Tensor | None) -> Sequence[torch.Tensor]:
    """The sequences of x [sample, token, ...], which are packed if there are `cu_seqlens`."""
    return [x] if cu_seqlens is None else x.split(cu_seqlens.diff().tolist(), dim=1)


def _unit(x: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """x [..., size] over its norm."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + eps)


def _causal_conv1d(
    x: torch.Tensor, weight: torch.Tensor, bias: Any, cu_seqlens: Any, **unused: Any
) -> tuple[torch.Tensor, None]:
    """SiLU of x [sample, token, channel] after a convolution of each channel with weight [channel, width], in each
    sequence."""
    outputs = []
    for part in _sequences(x, cu_seqlens):
        padded = torch.nn.functional.pad(part.transpose(1, 2), (weight.shape[1] - 1, 0))
        convolved = torch.nn.functional.conv1d(padded, weight.unsqueeze(1), bias, groups=len(weight))
        outputs.append(torch.nn.functional.silu(convolved.transpose(1, 2)))
    return torch.cat(outputs, dim=1), None

"""Replicas of weights that are stored in 8 bits (`--fp8-param-gather`).

A replica has the same tensors as its home and so computes the same, bit for bit. What Megatron-LM derives from gathered
weights is also derived from those of replicas. Weights that are stored in 16 bits are sent in 16 bits; Transformer
Engine then quantizes replica and home to the same bits.
"""

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core import fp8_utils
from megatron.core.transformer.transformer_config import TransformerConfig

from balancing.experts.engine.weights import Parameters, WeightFormat

__all__ = ["QuantizedWeights", "copied_bytes", "weight_format"]

# MXFP8 rounds rows and columns separately, so both are sent. In the other formats columns follow from rows.
_SENT = {
    "Float8Tensor": ("data", "fp8_scale_inv"),
    "Float8BlockwiseQTensor": ("rowwise_data", "rowwise_scale_inv"),
    "MXFP8Tensor": ("rowwise_data", "rowwise_scale_inv", "columnwise_data", "columnwise_scale_inv"),
}


class QuantizedWeights(WeightFormat):
    """Weights among which are Transformer Engine's quantized tensors."""

    def parts(self, parameter: Any) -> list[torch.Tensor]:
        if not fp8_utils.is_float8tensor(parameter):
            return super().parts(parameter)
        stored = parameter.get_metadata()
        return [stored[name] for name in _SENT[type(parameter).__name__]]

    def replica(self, parameter: Any, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        if not fp8_utils.is_float8tensor(parameter):
            return super().replica(parameter, parts)
        kind = type(parameter)
        stored = {
            name: None if isinstance(value, torch.Tensor) else value for name, value in parameter.get_metadata().items()
        }
        stored |= zip(_SENT[kind.__name__], parts, strict=True)
        stored |= {"shape": parameter.shape, "dtype": parameter.dtype, "device": parameter.device}
        return torch.nn.Parameter(kind(**stored))  # fused operations register it

    def received(self, replicas: Parameters) -> None:
        fp8_utils.post_all_gather_processing([weight for weight in replicas if fp8_utils.is_float8tensor(weight)])


def weight_format(expert: Parameters) -> WeightFormat:
    """How the parameters of an expert are stored."""
    return QuantizedWeights() if any(map(fp8_utils.is_float8tensor, expert)) else WeightFormat()


def copied_bytes(config: TransformerConfig) -> int:
    """Bytes that a layer keeps for each weight element of a replica in addition to what is sent: the element in 8 bits
    by row and by column, or by column only if the element by row is sent. In 4 bits, both are one byte."""
    if not config.fp8:
        return int(bool(config.fp4))
    if not config.fp8_param:
        return 2
    return 0 if config.fp8_recipe == "mxfp8" else 1

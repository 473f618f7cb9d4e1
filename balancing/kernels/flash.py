"""FlashAttention on GPUs, all pieces of a call in one launch. Its causal mask is from the bottom right.

PyTorch has FlashAttention 2 and a switch that puts version 3 or 4 behind the same operators, for the whole process. The
flash-attn package has version 2, too. Gradients repeat bit for bit under `torch.use_deterministic_algorithms`.
"""

from collections.abc import Callable

import torch
import torch.nn.attention

from balancing.kernels.base import bounds, too_large, window_arguments

__all__ = ["PackageFlash", "TorchFlash"]


class TorchFlash:
    """FlashAttention by PyTorch's operators.

    switched: what PyTorch's switch is set to, "FA3" or "FA4"; None for PyTorch's own, FlashAttention 2.

    Raises what the switch raises where the version is not installed or does not fit.
    """

    def __init__(self, switched: str | None = None) -> None:
        self._switched = switched
        self._switch()

    def _switch(self) -> None:
        if torch.nn.attention.current_flash_attention_impl() == self._switched:
            return
        if self._switched is None:
            torch.nn.attention.restore_flash_attention_impl()
        else:
            torch.nn.attention.activate_flash_attention_impl(self._switched)

    def refusal(self, backward, q, k, v, pieces):
        return "" if self._switched is None else too_large(q, k, v)

    def forward(self, q, k, v, pieces, scale):
        self._switch()
        out, logsumexp, *_ = torch.ops.aten._flash_attention_forward(
            q, k, v, *bounds(pieces, q.device), 0.0, pieces.causal, False, scale=scale, **window_arguments(pieces)
        )
        return out, logsumexp

    def backward(self, grad, q, k, v, out, logsumexp, pieces, scale):
        self._switch()
        seed = torch.empty(2, dtype=torch.uint64, device=q.device)  # of dropout, which is off
        unused = torch.empty(0, dtype=torch.uint64, device=q.device)
        return torch.ops.aten._flash_attention_backward(
            grad.contiguous(),
            *(q, k, v, out, logsumexp.contiguous()),
            *bounds(pieces, q.device),
            *(0.0, pieces.causal, seed, unused),
            scale=scale,
            **window_arguments(pieces),
        )


class PackageFlash:
    """The flash-attn package, version 2.7 or later.

    Raises ImportError or AttributeError where it is not installed, or is of another version.
    """

    def __init__(self) -> None:
        _from_package("forward"), _from_package("backward")

    def forward(self, q, k, v, pieces, scale):
        out, logsumexp, *_ = _from_package("forward")(
            *(q, k, v, *bounds(pieces, q.device)),
            dropout_p=0.0,
            softmax_scale=scale,
            causal=pieces.causal,
            **window_arguments(pieces),
        )
        return out, logsumexp

    def backward(self, grad, q, k, v, out, logsumexp, pieces, scale):
        gradients = tuple(torch.empty_like(x) for x in (q, k, v))
        _from_package("backward")(
            grad.contiguous(),
            *(q, k, v, out, logsumexp.contiguous()),
            *gradients,
            *bounds(pieces, q.device),
            dropout_p=0.0,
            softmax_scale=scale,
            causal=pieces.causal,
            **({"window_size_left": -1, "window_size_right": -1} | window_arguments(pieces)),
            softcap=0.0,
            alibi_slopes=None,
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )
        return gradients


def _from_package(direction: str) -> Callable:
    from flash_attn import flash_attn_interface  # type: ignore[import-not-found]

    return getattr(flash_attn_interface, f"_flash_attn_varlen_{direction}")

"""cuDNN's attention on packed sequences, by Transformer Engine's functions.

`fused_attn_fwd` gives the output and the statistics of the softmax, which are the logsumexp, [tokens, heads, 1].
`fused_attn_bwd` takes them, and Transformer Engine's own ring gives it those of all keys: so does the engine. Pieces
with as many keys as queries are causal from the top left, which is then the same as from the bottom right and which
more versions of cuDNN take.

cuDNN plans each shape anew, in tenths of a second. Transformer Engine rounds numbers of tokens up, and numbers of
sequences up to 512, so that plans are few; this kernel rounds the rest, counts plans, and beyond `MOST_PLANS` refuses
calls that need another.
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch

from balancing.kernels.base import Pieces, accumulation_dtype, bounds, too_large

__all__ = ["MOST_PLANS", "CudnnPacked"]

MOST_PLANS = 128  # of both directions together
_MOST_ROUNDED = 512  # sequences whose number Transformer Engine rounds itself
# Arguments that some versions of the functions do not have, and do not need.
_OPTIONAL = {"bottom_right_diagonal", "do_format", "dqkv_dtype", "dqkv_layout", "o_format"}


class CudnnPacked:
    """Values may have another size than keys.

    Keys and values that lie beside each other in each head, as in the engine's workspace, are read in place; others
    are copied if they are not contiguous.

    `version` is cuDNN's. Raises ImportError, or what an import of Transformer Engine raises, where it is not there,
    and TypeError for functions of another version that take other arguments.
    """

    def __init__(self) -> None:
        from transformer_engine.pytorch.constants import TE_DType  # type: ignore[import-not-found]
        from transformer_engine.pytorch.cpp_extensions import fused_attn  # type: ignore[import-not-found]
        from transformer_engine.pytorch.utils import get_cudnn_version  # type: ignore[import-not-found]

        self.version = ".".join(map(str, get_cudnn_version()[:2]))
        self._backend = fused_attn.FusedAttnBackend["F16_arbitrary_seqlen"]
        self._dtypes = TE_DType
        self._directions = [_Function(getattr(fused_attn, f"fused_attn_{name}")) for name in ("fwd", "bwd")]
        self._plans: set[tuple[Any, ...]] = set()
        # Of dropout, which is off. Without a generator of its own, each call would advance that of the model, and ranks
        # make different numbers of calls.
        self._draw: torch.Generator | None = None
        self._state: torch.Tensor | None = None

    def refusal(self, backward: bool, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, pieces: Pieces) -> str:
        """As `base.refusal`."""
        if reason := too_large(q, k, v):
            return reason
        if torch.are_deterministic_algorithms_enabled() and _squares_memory(q.device):
            return "cuDNN repeats bit for bit on this GPU only with memory for the square of the length"
        plan = (
            *(backward, *_mask(pieces)[:2], _is_interleaved(k, v), q.shape[1:], k.shape[1:], v.shape[2], q.dtype),
            *(_rounded(len(pieces.queries), 32), _rounded(len(q), 1024), _rounded(len(k), 1024)),
        )
        if plan not in self._plans:
            if len(self._plans) >= MOST_PLANS:
                return f"cuDNN has {MOST_PLANS} plans for other shapes"
            self._plans.add(plan)
        return ""

    @property
    def generators(self) -> list[torch.Generator]:
        """Those that a CUDA graph of calls must know."""
        return [] if self._draw is None else [self._draw]

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, pieces: Pieces, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self._draw is None or self._draw.device != q.device:
            self._draw = torch.Generator(q.device)
        arguments = self._arguments(q, k, v, pieces, scale)
        out, saved, *_ = self._directions[0](is_training=True, rng_gen=self._draw, **arguments)
        statistics = saved[0]
        if statistics.shape != (*q.shape[:2], 1) or statistics.dtype is not accumulation_dtype(q.dtype):
            raise RuntimeError(
                f"cuDNN {self.version} gives statistics {list(statistics.shape)} in {statistics.dtype}, not "
                f"{[*q.shape[:2], 1]} in {accumulation_dtype(q.dtype)}"
            )
        # Of one query `t` counts as contiguous, with another stride.
        return out, statistics[..., 0].t().clone(memory_format=torch.contiguous_format)

    def backward(
        self,
        grad: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        logsumexp: torch.Tensor,
        pieces: Pieces,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        if self._state is None or self._state.device != q.device:
            self._state = torch.zeros(2, dtype=torch.int64, device=q.device)
        arguments = self._arguments(q, k, v, pieces, scale)
        dq, dk, dv, *_ = self._directions[1](
            o=out.contiguous(),
            d_o=grad.contiguous(),
            aux_ctx_tensors=[logsumexp.t().contiguous()[..., None], self._state],
            deterministic=torch.are_deterministic_algorithms_enabled(),
            do_format="thd",
            dqkv_layout=arguments["qkv_layout"],
            dqkv_dtype=self._dtypes.get(q.dtype),
            **arguments,
        )
        return dq, dk, dv

    def _arguments(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, pieces: Pieces, scale: float
    ) -> dict[str, Any]:
        """What both functions take."""
        *ends, longest, most_keys = bounds(pieces, q.device)
        query_ends, key_ends = (_with_empty(each, len(pieces.queries)) for each in ends)
        mask, window, bottom_right = _mask(pieces)
        layout = "thd_th2d" if _is_interleaved(k, v) else "thd_thd_thd"
        if layout == "thd_thd_thd":
            k, v = k.contiguous(), v.contiguous()
        return {
            "max_seqlen_q": _rounded(longest, 1),
            "max_seqlen_kv": _rounded(most_keys, 1),
            "cu_seqlens_q": query_ends,
            "cu_seqlens_kv": key_ends,
            "cu_seqlens_q_padded": query_ends,
            "cu_seqlens_kv_padded": key_ends,
            "q": q.contiguous(),
            "k": k,
            "v": v,
            "fake_dtype": q.dtype,
            "fused_attention_backend": self._backend,
            "attn_scale": scale,
            "dropout": 0.0,
            "qkv_layout": layout,
            "o_format": "thd",
            "attn_bias_type": "no_bias",
            "attn_mask_type": mask,
            "window_size": window,
            "bottom_right_diagonal": bottom_right,
        }


class _Function:
    """A function of Transformer Engine, called with names, of which it need not have those in `_OPTIONAL`."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function, self._names = function, inspect.signature(function).parameters

    def __call__(self, **given: Any) -> Any:
        if unknown := given.keys() - self._names.keys() - _OPTIONAL:
            raise TypeError(f"{self._function.__name__} takes no {', '.join(sorted(unknown))}")
        return self._function(**{name: value for name, value in given.items() if name in self._names})


def _mask(pieces: Pieces) -> tuple[str, tuple[int, int], bool]:
    """The mask by its name there, keys before and after its own that a query sees, and whether these are counted from
    the last query and key of a piece."""
    if not pieces.causal:
        return "padding", (-1, -1), False
    longer = pieces.queries != pieces.keys
    left = -1 if pieces.window is None else pieces.window
    return "padding_causal_bottom_right" if longer else "padding_causal", (left, 0), longer


def _is_interleaved(k: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether each head's key and value lie beside each other, and nothing else between them."""
    heads, size = k.shape[1:]
    return (
        k.shape == v.shape
        and k.stride() == v.stride() == (2 * heads * size, 2 * size, 1)
        and v.data_ptr() - k.data_ptr() == size * k.element_size()
    )


def _rounded(number: int, least: int) -> int:
    """A power of two, or above 32,768 a multiple of that."""
    if number > 1 << 15:
        return -(-number >> 15) << 15
    return max(least, 1 << (number - 1).bit_length())


def _with_empty(ends: torch.Tensor, pieces: int) -> torch.Tensor:
    """The ends, with so many empty pieces behind that their number is rounded where Transformer Engine does not."""
    if pieces <= _MOST_ROUNDED:
        return ends
    return torch.cat((ends, ends[-1:].expand(_rounded(pieces, 1) - pieces)))


def _squares_memory(device: torch.device) -> bool:
    """Whether gradients that repeat need memory for all scores there, as on Hopper."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9

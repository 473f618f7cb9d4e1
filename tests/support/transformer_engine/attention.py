"""What unfused attention calls: softmax with a scale and a mask, and documents laid out with padding and without."""

from collections.abc import Callable
from itertools import pairwise

import torch

from tests.support.transformer_engine.cpp_module import MODULE, stands_in

_MASKED = -10000.0  # what the kernels put in the place of a score


def _softmax(scores: torch.Tensor, masked: torch.Tensor | None, scale: float) -> torch.Tensor:
    """A row that is masked as a whole becomes 0."""
    scores = scores.float() * scale
    if masked is None:
        return scores.softmax(-1)
    masked = masked.bool()
    return scores.masked_fill(masked, _MASKED).softmax(-1).masked_fill(masked.all(-1, keepdim=True), 0)


def _future(scores: torch.Tensor) -> torch.Tensor:
    """bool [queries, keys]: keys after a query, whose last one is the last key."""
    queries, keys = scores.shape[-2:]
    return torch.ones(queries, keys, dtype=torch.bool).triu(1 + keys - queries)


@stands_in
def scaled_softmax_forward(input: torch.Tensor, scale_factor: float) -> torch.Tensor:
    return _softmax(input, None, scale_factor).to(input.dtype)


@stands_in
def scaled_masked_softmax_forward(input: torch.Tensor, mask: torch.Tensor, scale_factor: float) -> torch.Tensor:
    return _softmax(input, mask, scale_factor).to(input.dtype)


@stands_in
def scaled_upper_triang_masked_softmax_forward(input: torch.Tensor, scale_factor: float) -> torch.Tensor:
    return _softmax(input, _future(input), scale_factor).to(input.dtype)


@stands_in
def scaled_aligned_causal_masked_softmax_forward(input: torch.Tensor, scale_factor: float) -> torch.Tensor:
    return _softmax(input, _future(input), scale_factor).to(input.dtype)


def _backward(name: str) -> Callable:
    def backward(output_grad: torch.Tensor, softmax_results: torch.Tensor, scale_factor: float) -> torch.Tensor:
        gradient, softmax = output_grad.float(), softmax_results.float()
        gradient = softmax * (gradient - (gradient * softmax).sum(-1, keepdim=True)) * scale_factor
        return gradient.to(output_grad.dtype)

    backward.__name__ = name
    return backward


for _kind in ("scaled", "scaled_masked", "scaled_upper_triang_masked", "scaled_aligned_causal_masked"):
    stands_in(_backward(f"{_kind}_softmax_backward"))


@stands_in
def convert_thd_to_bshd(tensor: torch.Tensor, cu_seqlens: torch.Tensor, b: int, max_seq_len: int) -> torch.Tensor:
    """[tokens, heads, dim], documents one after the other -> [document, position, heads, dim], padded with 0."""
    bounds = cu_seqlens.tolist()
    padded = tensor.new_zeros(b, max_seq_len, *tensor.shape[1:])
    for document, (start, stop) in enumerate(pairwise(bounds)):
        padded[document, : stop - start] = tensor[start:stop]
    return padded


@stands_in
def convert_bshd_to_thd(tensor: torch.Tensor, cu_seqlens: torch.Tensor, t: int) -> torch.Tensor:
    bounds = cu_seqlens.tolist()
    tokens = tensor.new_zeros(t, *tensor.shape[2:])
    for document, (start, stop) in enumerate(pairwise(bounds)):
        tokens[start:stop] = tensor[document, : stop - start]
    return tokens


@stands_in
def get_fused_attn_backend(*unused: object, **also_unused: object) -> tuple[object, str]:
    """There is no fused attention."""
    return MODULE.NVTE_Fused_Attn_Backend.NVTE_No_Backend, "a CPU has none"

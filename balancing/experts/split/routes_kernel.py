"""`routes.route` on a GPU in one Triton kernel. With operations of torch it is ten launches, and four backward."""

from typing import Any

import torch
import triton
import triton.language as tl

from balancing.experts.split.launching import launch

__all__ = ["ROUTE_OPTIONS", "Route", "number_routes", "route_fused"]

ROUTE_OPTIONS = {"TOKENS": 256, "COLUMNS": 32, "num_warps": 4}


@triton.jit(
    do_not_specialize=[
        *("chosen", "probs", "expert", "first", "last", "served", "given", "tokens", "experts", "physicals")
    ]
)
def number_routes(
    chosen, probs, expert, first, last, served, given, tokens, experts, physicals, TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Some tokens and instances. The tokens of an expert are numbered from those before on.

    chosen: uint8 [token, expert]; others: of `route`. served, given: uint8 and float [token, physical], written.
    """
    start = tl.program_id(0) * TOKENS
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    real = column < physicals
    of = tl.load(expert + column, mask=real, other=0)
    number = tl.zeros([COLUMNS], tl.int32)
    each = tl.arange(0, TOKENS)[:, None]
    for earlier in range(0, start, TOKENS):
        at = (earlier + each).to(tl.int64) * experts + of[None, :]
        number += tl.sum(tl.load(chosen + at, mask=real[None, :], other=0).to(tl.int32), 0)
    token = (start + each).to(tl.int64)
    mask = (token < tokens) & real[None, :]
    here = tl.load(chosen + token * experts + of[None, :], mask=mask, other=0).to(tl.int32)
    number = number[None, :] + tl.cumsum(here, 0)
    low, high = tl.load(first + column, mask=real, other=0), tl.load(last + column, mask=real, other=0)
    here = (here > 0) & (number > low[None, :]) & (number <= high[None, :])
    weight = tl.load(probs + token * experts + of[None, :], mask=mask & here, other=0)
    out = token * physicals + column[None, :]
    tl.store(served + out, here.to(tl.uint8), mask=mask)
    tl.store(given + out, weight, mask=mask)


class Route(torch.autograd.Function):
    """`route`, with the gradient of the probabilities."""

    @staticmethod
    def forward(
        ctx: Any, probs: torch.Tensor, routing_map: torch.Tensor, *split: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        (tokens, experts), physicals = probs.shape, len(split[0])
        served = routing_map.new_empty(tokens, physicals)
        given = probs.new_empty(tokens, physicals)
        grid = triton.cdiv(tokens, ROUTE_OPTIONS["TOKENS"]), triton.cdiv(physicals, ROUTE_OPTIONS["COLUMNS"])
        tensors = routing_map.view(torch.uint8), probs, *split, served.view(torch.uint8), given
        launch(number_routes, grid, tensors, (tokens, experts, physicals), ROUTE_OPTIONS)
        ctx.save_for_backward(split[0], served)
        ctx.experts = experts
        ctx.mark_non_differentiable(served)
        return served, given

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        expert, served = ctx.saved_tensors
        gradient = torch.where(served, gradients[1], 0)
        return gradient.new_zeros(len(served), ctx.experts).index_add_(1, expert, gradient), None, None, None, None


def route_fused(
    routing_map: torch.Tensor, probs: torch.Tensor, expert: torch.Tensor, first: torch.Tensor, last: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `routes.route`, in one launch."""
    served: torch.Tensor
    served, given = Route.apply(probs.contiguous(), routing_map.contiguous(), expert, first, last)
    return served, given

"""The router's choices, moved from experts to the instances that serve them: what a dispatcher of instances takes."""

import torch

__all__ = ["route"]


def route(
    routing_map: torch.Tensor, probs: torch.Tensor, expert: torch.Tensor, first: torch.Tensor, last: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """`routing_map` and `probs` by instance: bool and float [token, physical].

    routing_map, probs: bool and float [token, expert].
    expert, first, last: int64 [physical], of `RankSplit`, for the source rank of these tokens.
    """
    # Tokens become the inner dimension: along an outer one, a GPU adds sequentially.
    chosen = routing_map.T.contiguous()
    number = (chosen.cumsum(dim=1, dtype=torch.int32) * chosen).index_select(0, expert)
    served = ((number > first[:, None]) & (number <= last[:, None])).T.contiguous()
    return served, probs.index_select(1, expert) * served

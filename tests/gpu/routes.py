"""Which experts tokens are sent to: noted, to count decisions that flip between two runs; repeated from a run before,
so that none flips; or forced to be uneven."""

from collections import Counter
from typing import Any

import numpy as np

__all__ = ["first_flip", "flipped", "watch_routes"]


def watch_routes(
    routes: dict[int, list[bytes]] | None, skew: float, replayed: dict[int, list[bytes]] | None = None
) -> None:
    """Have routers note the experts of each micro-batch in `routes`, by layer, unless that is None; with `skew` send so
    many times the mean to the experts of the first expert-parallel rank; and with `replayed`, such notes of this rank,
    choose these experts again, weighted by the scores that they have now."""
    import torch
    from megatron.core import parallel_state
    from megatron.core.transformer.moe.router import TopKRouter

    routing = TopKRouter.routing
    micro_batches: Counter[int] = Counter()  # by layer, that were routed

    def watched(self: Any, logits: Any, *args: Any, **kwargs: Any) -> Any:
        if skew:
            logits = logits + (_forced(logits, skew) - logits).detach()
        if replayed is not None:
            bits = np.frombuffer(replayed[self.layer_number][micro_batches[self.layer_number]], np.uint8)
            micro_batches[self.layer_number] += 1
            chosen = torch.from_numpy(np.unpackbits(bits, count=logits.numel())).to(logits.device).view(logits.shape)
            logits = logits.masked_fill(chosen == 0, -1e4)
        found = routing(self, logits, *args, **kwargs)
        if routes is not None:
            bits = np.packbits(found[1].detach().bool().cpu().numpy())
            routes.setdefault(self.layer_number, []).append(bits.tobytes())
        return found

    def _forced(logits: Any, skew: float) -> Any:
        """Logits whose largest is an expert of the first rank with probability skew / ranks, else any other."""
        ranks, experts = parallel_state.get_expert_model_parallel_world_size(), logits.shape[-1]
        own = experts // ranks
        chances = torch.full((experts,), (1 - skew / ranks) / (experts - own), device=logits.device)
        chances[:own] = skew / ranks / own
        noise = -torch.log(-torch.log(torch.rand(logits.shape, device=logits.device).clamp(1e-9, 1 - 1e-7)))
        return (torch.log(chances) + noise).to(logits.dtype)

    TopKRouter.routing = watched


def flipped(ours: Any, theirs: Any, iterations: int) -> tuple[list[int], int]:
    """(decisions that flipped in each iteration, all decisions of one), over the ranks of two runs: a decision is an
    expert that a token is sent to in a layer."""
    counts, of = [0] * iterations, 0
    for one, other in zip(ours, theirs, strict=True):
        assert one.routes.keys() == other.routes.keys() and one.routes, "routes were not noted"
        for layer, batches in one.routes.items():
            assert len(batches) == len(other.routes[layer]), f"layer {layer} ran another number of times"
            for number, (first, second) in enumerate(zip(batches, other.routes[layer], strict=True)):
                mine, yours = (np.unpackbits(np.frombuffer(bits, np.uint8)) for bits in (first, second))
                counts[number * iterations // len(batches)] += int((mine & ~yours & 1).sum())
                of += int(mine.sum())
    return counts, of // iterations


def first_flip(ours: Any, theirs: Any, iterations: int) -> int:
    """The first iteration in which a decision flipped, from 0; their number if none did."""
    counts, _ = flipped(ours, theirs, iterations)
    return next((iteration for iteration, count in enumerate(counts) if count), iterations)

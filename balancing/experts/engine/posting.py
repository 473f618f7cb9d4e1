"""When the turns of transfers are posted: at once, in parts when compute begins, or one at a time.

Transfers leave the links to the exchanges of tokens (Pro-Prophet, arXiv 2411.10003, section V). Two stretches of
compute follow each other, the experts and what lies between two MoE layers, with an exchange before each. A transfer is
posted in two parts when they begin, in proportion to their lengths. If exchange and transfer halve a link's speed for
each other while both are under way, no other way ends the second exchange and the transfer sooner, whatever the
transfer takes. Where all streams of a GPU share one queue (CUDA_DEVICE_MAX_CONNECTIONS=1), its turns are posted one at
a time instead, with compute in between. All ranks of a group post the same turns at the same points, which gives them
one order.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from balancing.experts.engine.relay import Hop, Relay

__all__ = ["Postings"]


@dataclass
class _Posting:
    """A transfer with turns left.

    relay: its hops.
    shares: the parts of it that are left, the next first.
    due: the part that was to be posted so far.
    """

    relay: Relay
    shares: list[float]
    due: float = 0.0

    def post_part(self) -> None:
        """Post the next part, rounded to turns; after the last one, whatever is left."""
        if not self.shares:
            return self.relay.post_rest()
        self.due += self.shares.pop(0)
        self.relay.post(round(self.due * self.relay.turns) - self.relay.posted)


class Postings:
    """The transfers of one process group that have turns left to post.

    process_group: of the ranks that relay.
    stream: that transfers run on; None on the CPU.
    turn_by_turn: whether turns are posted one at a time, by `advance`.
    expert_share: part of a layer's compute that is its experts'. None posts transfers whole.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup,
        stream: torch.cuda.Stream | None,
        *,
        turn_by_turn: bool,
        expert_share: float | None,
    ) -> None:
        assert expert_share is None or 0 <= expert_share <= 1, f"expert_share={expert_share}"
        self.turn_by_turn = turn_by_turn
        self._process_group, self._stream = process_group, stream
        self._expert_share = None if turn_by_turn else expert_share
        self._left: list[_Posting] = []  # the oldest first; the same transfers on all ranks

    def start(self, hops: list[Hop], turns: int, shares: Sequence[float]) -> Relay:
        """Start a transfer.

        hops: of this rank.
        turns: of the whole group; 0 if nobody sends.
        shares: parts to post now and at each `begin_compute` that follows, where transfers are posted in parts.
        """
        in_parts = self._expert_share is not None and len(shares) > 1
        if not (turns and (self.turn_by_turn or in_parts)):
            return Relay(hops, self._process_group, self._stream)
        posting = _Posting(Relay(hops, self._process_group, self._stream, turns), list(shares))
        if in_parts:
            posting.post_part()
        else:
            posting.relay.post()
        self._left.append(posting)
        return posting.relay

    def advance(self) -> None:
        """Post the next turn of the oldest transfer, where they are posted one at a time."""
        self._drop_posted()
        if self.turn_by_turn and self._left:
            self._left[0].relay.post()

    def begin_compute(self) -> None:
        """Post the next part of each transfer, where they are posted in parts: a stretch of compute begins."""
        self._drop_posted()
        if not self.turn_by_turn:
            for posting in self._left:
                posting.post_part()

    def shares(self, *, begins_with_experts: bool) -> tuple[float, float]:
        """Parts of a transfer in two stretches of compute that follow each other."""
        of_experts = self._expert_share or 0.0
        return (of_experts, 1 - of_experts) if begins_with_experts else (1 - of_experts, of_experts)

    def _drop_posted(self) -> None:
        self._left = [posting for posting in self._left if not posting.relay.is_posted]

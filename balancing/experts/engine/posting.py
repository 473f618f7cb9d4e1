"""The times at which transfers are sent, so that they do not compete with the token all-to-alls.

Transfers should use the links while ranks compute (Pro-Prophet, arXiv 2411.10003, section V). Two stretches of compute
alternate: the experts, and everything between the experts of two MoE layers. An all-to-all precedes each stretch. A
transfer is sent in two parts, one at the beginning of each stretch, in proportion to their lengths. If an all-to-all
and a transfer at the same time each get half of a link's speed, no other division ends the second all-to-all and the
transfer sooner, for any length of the transfer.

If all streams of a GPU share one queue (CUDA_DEVICE_MAX_CONNECTIONS=1), the steps of a transfer are posted one at a
time instead, with compute in between (`Relay` says why). All ranks of a group post the same steps at the same points,
so messages have the same order on all ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from balancing.experts.engine.relay import Hop, Relay

__all__ = ["Postings"]


@dataclass
class _Posting:
    """A transfer with steps that are not yet posted.

    relay: the transfer.
    shares: fractions of the transfer that are still to be posted, the next one first.
    due: sum of the fractions so far.
    """

    relay: Relay
    shares: list[float]
    due: float = 0.0

    def post_part(self) -> None:
        """Post the next part, rounded to steps. After the last part, post all remaining steps."""
        if not self.shares:
            return self.relay.post_rest()
        self.due += self.shares.pop(0)
        self.relay.post(round(self.due * self.relay.turns) - self.relay.posted)


class Postings:
    """The transfers of one process group with steps that are not yet posted.

    process_group: the ranks that relay.
    stream: the stream of the transfers; None on the CPU.
    turn_by_turn: whether steps are posted one at a time, by `advance`.
    expert_share: fraction of a layer's compute that is expert compute, 0 to 1. None sends transfers whole.
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

        hops: the hops of this rank.
        turns: number of steps of the longest chain of the group; 0 if no rank sends.
        shares: fractions to post now and at each following `begin_compute`, if transfers are sent in parts.
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
        """Post the next step of the oldest transfer, if steps are posted one at a time."""
        if self._left:
            self._drop_posted()
        if self.turn_by_turn and self._left:
            self._left[0].relay.post()

    def begin_compute(self) -> None:
        """Post the next part of each transfer, if transfers are sent in parts."""
        if not self._left:
            return
        self._drop_posted()
        if not self.turn_by_turn:
            for posting in self._left:
                posting.post_part()

    def shares(self, *, begins_with_experts: bool) -> tuple[float, float]:
        """Fractions of a transfer to send in two successive stretches of compute, in order.

        begins_with_experts: whether the first of them is expert compute.
        """
        expert_share = self._expert_share or 0.0
        return (expert_share, 1 - expert_share) if begins_with_experts else (1 - expert_share, expert_share)

    def _drop_posted(self) -> None:
        self._left = [posting for posting in self._left if not posting.relay.is_posted]

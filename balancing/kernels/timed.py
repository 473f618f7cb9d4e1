"""A kernel of attention that keeps what its calls computed and how long the device took, without a wait of the host."""

from typing import Any, NamedTuple

import numpy as np
import torch

from balancing.clock import DeviceClock
from balancing.cluster.job_rates import Calls, Work
from balancing.cluster.rates import TILE, tile_pairs
from balancing.kernels.base import Kernel, Pieces
from balancing.kernels.pairs import pair_flops

__all__ = ["TimedKernel"]

_MOST = 128  # calls that are kept from one `take` to the next


class _Call(NamedTuple):
    """flops: of a query-key pair, forward. begin, end: marks of the clock."""

    way: str
    flops: float
    pieces: Pieces
    begin: Any
    end: Any


class TimedKernel:
    """A `Kernel`. kernel: computes. clock: of the device. Calls with a sliding window are not kept."""

    def __init__(self, kernel: Kernel, clock: DeviceClock) -> None:
        self._kernel, self._clock = kernel, clock
        self._calls: list[_Call] = []

    def forward(self, q, k, v, pieces, scale):
        begin = self._clock.mark()
        result = self._kernel.forward(q, k, v, pieces, scale)
        self._keep("forward", q, v, pieces, begin)
        return result

    def backward(self, grad, q, k, v, out, logsumexp, pieces, scale):
        begin = self._clock.mark()
        result = self._kernel.backward(grad, q, k, v, out, logsumexp, pieces, scale)
        self._keep("backward", q, v, pieces, begin)
        return result

    def _keep(self, way: str, q: torch.Tensor, v: torch.Tensor, pieces: Pieces, begin: Any) -> None:
        if len(self._calls) < _MOST and pieces.window is None:
            flops = pair_flops(q.shape[1], q.shape[2], v.shape[2])
            self._calls.append(_Call(way, flops, pieces, begin, self._clock.mark()))

    def take(self) -> list[_Call]:
        """The calls since this was last called."""
        calls, self._calls = self._calls, []
        return calls

    def told(self, taken: list[_Call], way: str, name: str) -> Calls:
        """What calls of `take`, of which one at least is of this direction, tell of it once the device has passed them.

        name: name of the kernel.
        """
        own = [call for call in taken if call.way == way]
        timed = [(call, self._clock.seconds(call.begin, call.begin, call.end)[2]) for call in own]
        timed = [(call, seconds) for call, seconds in timed if seconds > 0]
        work, seconds = [_work(call.pieces) for call, _ in timed], [seconds for _, seconds in timed]
        return Calls(name, way, own[0].flops, work, seconds)


def _work(pieces: Pieces) -> Work:
    queries, keys = np.array(pieces.queries), np.array(pieces.keys)
    rows = -(-queries // TILE)
    pairs = tile_pairs(queries, keys) if pieces.causal else rows * -(-keys // TILE) * TILE**2
    return float(pairs.sum()), float(rows.sum() * TILE), float(len(queries))

"""Peak memory of a move: that of the stage before or after it, plus one layer."""

import gc
import weakref
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.support.moving import Plans, move_at
from tests.support.training import MOCK_DATA, MODEL, train_rank

PLAN: Plans = {2: ((6,), (2,))}
BASE = [*MODEL, *MOCK_DATA, *"--num-layers 8 --hidden-size 64 --train-iters 4 --pipeline-model-parallel-size 2".split()]
SMALL = 1 << 15  # bytes of messages about layers, and of what is no layer's


class _Live(TorchDispatchMode):
    """Counts the bytes of all memory that tensors hold."""

    def __init__(self) -> None:
        super().__init__()
        self._bytes: dict[weakref.ref, int] = {}
        self.now = self.peak = 0
        for found in gc.get_objects():
            if isinstance(found, torch.Tensor):
                self._add(found)

    def _add(self, tensor: torch.Tensor) -> None:
        memory = weakref.ref(tensor.untyped_storage(), self._gone)
        if memory not in self._bytes:
            self._bytes[memory] = tensor.untyped_storage().nbytes()
            self.now += self._bytes[memory]
            self.peak = max(self.peak, self.now)

    def _gone(self, memory: weakref.ref) -> None:
        self.now -= self._bytes.pop(memory)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._add(leaf)
        return result


def _peak(argv: list[str]) -> tuple[int, int, int, int]:
    """Bytes on this rank before a move, after it, at most during it, and of the weights in one layer."""
    from megatron.balanced.layers import balancer as layers

    seen: list[int] = []
    move_at(PLAN)
    move = layers.LayerBalancer.move

    def watched(self: Any, plan: Any) -> Any:
        gc.collect()
        with _Live() as live:
            before = live.now
            moved = move(self, plan)
            gc.collect()
        weights = sum(p.numel() * p.element_size() for p in self.mover.models()[0].decoder.layers[0].parameters())
        seen.extend((before, live.now, live.peak, weights))
        return moved

    layers.LayerBalancer.move = watched
    train_rank(argv, False)
    before, after, peak, weights = seen
    return before, after, peak, weights


# flags, bytes of a parameter that a rank holds for each of its weight's two, copies of all weights beside that
CASES = {
    "bf16": ("", 2 + 4 + 4 + 8, 0),
    "bf16, distributed optimizer": ("--use-distributed-optimizer", 2 + 4 + 4 + 8, 1),
}


@pytest.mark.parametrize("case", CASES)
def test_no_more_than_before_or_after_and_one_layer(pool, case):
    flags, state, copies = CASES[case]
    for before, after, peak, weights in pool.run(2, _peak, [*BASE, *flags.split(), "--bf16", "--balance-layers"]):
        layer = weights * state // 2
        assert abs(before - after) > 1.5 * layer, "hardly anything moved"
        layers = round(max(before, after) / layer)
        assert peak <= max(before, after) + layer + copies * layers * weights + SMALL

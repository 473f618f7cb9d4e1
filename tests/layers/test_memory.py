"""Peak memory of a move: that of the stage before or after it, plus one layer. The bytes of layers that plans use."""

import gc
import weakref
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.support.moving import Plans, at_end_of_step, move_at
from tests.support.sampled import sampled
from tests.support.training import MOCK_DATA, MODEL, MOE, train_rank

PLAN: Plans = {2: ((18,), (6,))}  # so many that one layer more is less than all weights once more
PP2 = "--num-layers 24 --hidden-size 48 --train-iters 3 --pipeline-model-parallel-size 2"
BASE = [*MODEL, *MOCK_DATA, *PP2.split()]
SMALL = 24 << 11  # bytes of messages about 24 layers, and of what is no layer's


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
    move = layers.LayerBalancer.move_to

    def watched(self: Any, plan: Any) -> Any:
        gc.collect()
        with _Live() as live:
            before = live.now
            moved = move(self, plan)
            gc.collect()
        weights = sum(p.numel() * p.element_size() for p in self.mover.models()[0].decoder.layers[0].parameters())
        seen.extend((before, live.now, live.peak, weights))
        return moved

    layers.LayerBalancer.move_to = watched
    train_rank(argv, False)
    before, after, peak, weights = seen
    return before, after, peak, weights


DISTRIBUTED = "--use-distributed-optimizer"
# ranks, flags, bytes that a rank holds for each element of a weight
CASES = {
    "bf16": (2, "", 2 + 4 + 4 + 8),
    "bf16, distributed optimizer": (2, DISTRIBUTED, 2 + 4 + 4 + 8),
    "bf16, distributed optimizer, small buckets": (
        4,
        f"{DISTRIBUTED} --overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 2000",
        2 + 4 + 4 / 2 + 8 / 2,
    ),
}


@pytest.mark.parametrize("case", sampled(CASES, "bf16, distributed optimizer, small buckets"))
def test_no_more_than_before_or_after_and_one_layer(pool, case):
    ranks, flags, state = CASES[case]
    for before, after, peak, weights in pool.run(ranks, _peak, [*BASE, *flags.split(), "--bf16", "--balance-layers"]):
        layer = weights * state / 2
        assert abs(before - after) > 1.5 * layer, "hardly anything moved"
        assert peak <= max(before, after) + layer + SMALL


def _caches(argv: list[str]) -> list[tuple[str, int, int]]:
    """What a move does to the allocator, with the bytes that all tensors hold by then, and those of gradients."""
    from megatron.balanced.layers import mover

    seen: list[tuple[str, int, int]] = []
    move_at(PLAN)
    move = mover.LayerMover.move

    def watched(self: Any, plan: Any) -> Any:
        gc.collect()
        with _Live() as live:

            def note(name: str) -> None:
                seen.append((name, live.now, sum(b.grad_data.nbytes for ddp in self._chunks for b in ddp.buffers)))

            for name in ("empty_cache", "reset_peak_memory_stats"):
                setattr(torch.cuda, name, partial(note, name))
            note("begin")
            moved = move(self, plan)
            note("end")
        return moved

    mover.LayerMover.move = watched
    train_rank(argv, False)
    return seen


def test_cached_memory_is_given_back_before_tensors_arrive_and_peaks_start_anew(pool):
    """Else tensors that arrive are carved out of the gradients' cached block, which a new buffer then cannot have."""
    for seen in pool.run(2, _caches, [*BASE, "--bf16", DISTRIBUTED, "--balance-layers"]):
        assert [name for name, *_ in seen] == ["begin", "empty_cache", "empty_cache", "reset_peak_memory_stats", "end"]
        begin, first, second, _, end = seen
        assert begin[2] > 0 and end[2] > 0 and first[2] == second[2] == 0
        assert first[1] <= begin[1] - begin[2] + SMALL, "gradients are not free when the cache is emptied"
        # Where layers left, what they held is freed later than that, and makes up for the buffer.
        most = max(first[1], end[1] - 0.5 * end[2])
        assert second[1] <= most, "the buffer is there before the cache is emptied"


def _bytes(argv: list[str]) -> tuple[dict[str, list[float]], dict[int, tuple[float, float]]]:
    """Bytes by layer as plans count them, and as they are in memory: weights with optimizer state, and gradients."""
    from megatron.balanced.shared.optimizer_state import states_of

    counted: dict[str, list[float]] = {}
    held: dict[int, tuple[float, float]] = {}

    def see(balancer: Any) -> None:
        mover = balancer.mover
        counted.update(travelling=list(mover.travelling_bytes()), resting=list(mover.resting_bytes()))
        states = states_of(balancer.run.optimizer)
        for layer in mover.models()[0].decoder.layers:
            resident = sum(p.nbytes for p in layer.parameters())
            resident += sum(t.nbytes for p in layer.parameters() if p in states for t in states[p].tensors.values())
            held[layer.layer_number - 1] = resident, sum(p.main_grad.nbytes for p in layer.parameters())

    move_at({})
    at_end_of_step(see)
    train_rank(argv, False)
    return counted, held


def test_state_of_experts_is_sharded_over_their_own_ranks(pool):
    """With experts on both ranks, no rank shares their state, while that of everything else is on two."""
    flags = f"{' '.join(MOE)} --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall {DISTRIBUTED}"
    argv = [*BASE, *flags.split(), "--num-layers", "4", "--train-iters", "1", "--bf16", "--balance-layers"]
    seen = pool.run(4, _bytes, argv)
    for layer in range(4):
        ranks = [(counted, held[layer]) for counted, held in seen if layer in held]
        assert len(ranks) == 2
        # What of dense weights a rank has the state of depends on where buckets are cut: the mean does not.
        resident, gradients = (sum(held[i] for _, held in ranks) / 2 for i in (0, 1))
        for counted, _ in ranks:
            assert counted["travelling"][layer] == pytest.approx(resident, rel=0.02)
            assert counted["resting"][layer] == pytest.approx(resident + gradients, rel=0.02)

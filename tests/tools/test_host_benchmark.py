"""What the benchmark of the host counts: launches, messages and calls of a layer, and which goals are missed."""

import pytest
import torch

from benchmarks.host.attention import Case, measure_attention
from benchmarks.host.counting import Counted, fake_ranks, measure


def test_operations_messages_and_calls_are_counted() -> None:
    import torch.distributed as dist

    def inner() -> None:
        numbers = torch.ones(4, 2)
        numbers[1:].view(-1).add_(1)
        dist.all_to_all_single(torch.empty(2), torch.ones(2), [1, 1], [1, 1])
        dist.isend(numbers, 1)

    with fake_ranks(0, 2):
        found = measure(inner, Counted(), repeats=2)
    counted = found.counted
    assert (counted.sends, counted.receives, counted.collectives, counted.messages) == (1, 0, 1, 2)
    assert counted.launches == 3, "two tensors of ones, an addition"
    assert counted.calls > 2 and found.seconds > 0 and found.additions > 0


@pytest.mark.parametrize("method", ["chunks", "ring"])
def test_a_layer_of_attention_is_measured(method: str) -> None:
    measured, rounds = measure_attention(Case(method, 4))
    counted = measured.counted
    assert rounds == (3 if method == "ring" else 1)
    assert counted.launches > 2 * (rounds + 1) and counted.messages >= 3 * rounds and measured.additions > 20

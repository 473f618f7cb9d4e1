"""Dropout draws the same masks as on GPUs, although the CPU has one random generator for host and device.

Tensor-parallel ranks hold different attention heads, so their attention masks must differ; they hold the same hidden
states without sequence parallelism, so those masks must agree. Replicas agree, recomputation repeats, and what a data
loader draws on the ranks that have one must not show.
"""

import hashlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.support.training import MODEL, assert_same, train, train_rank


def _digest(*tensors: torch.Tensor) -> str:
    return hashlib.sha256(b"".join(tensor.contiguous().numpy().tobytes() for tensor in tensors)).hexdigest()


def _draws(argv: list[str]) -> dict[str, Any]:
    """Train, and return the digest of each dropout mask by kind, and of the generators' states at the end."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker
    from megatron.training import training

    masks: dict[str, list[str]] = {"attention": [], "hidden": []}
    dropout, train_loop = torch.dropout, training.train

    def watched(input: torch.Tensor, p: float, train: bool) -> torch.Tensor:
        output = dropout(input, p, train)
        if train and p > 0:
            # Where the input is 0 (beyond the causal mask) nothing can be seen of the draw.
            kind = "attention" if input.dim() == 4 else "hidden"
            masks[kind].append(_digest((output == 0) & (input != 0)))
        return output

    def watched_loop(*args: Any, **kwargs: Any) -> Any:
        torch.nn.functional._VF.dropout = watched  # only now: Megatron has warmed up its fused dropout on noise before
        return train_loop(*args, **kwargs)

    training.train = watched_loop
    train_rank(argv, False)
    states = {name: _digest(state) for name, state in get_cuda_rng_tracker().get_states().items()}
    return {**masks, "default": _digest(torch.default_generator.get_state()), **states}


@pytest.fixture(scope="module")
def argv(corpus) -> Iterator[list[str]]:
    # Weights far from zero: no activation is 0 by itself.
    yield [
        *MODEL,
        *corpus,
        *"--train-iters 2 --global-batch-size 8 --init-method-std 0.1 --make-vocab-size-divisible-by 64".split(),
    ]


def _all_differ(one: list[str], other: list[str]) -> bool:
    return len(one) == len(other) > 0 and all(a != b for a, b in zip(one, other, strict=True))


def test_tensor_parallel_ranks(pool, argv):
    # The first rank of the two has the data loaders, with worker processes of their own; the second has none.
    first, second = pool.run(2, _draws, [*argv, *"--tensor-model-parallel-size 2 --num-workers 1".split()])
    assert len(first["attention"]) == 2 * 8 * 4  # iterations x micro-batches x layers
    assert _all_differ(first["attention"], second["attention"])
    assert len(first["hidden"]) == 2 * 8 * (1 + 2 * 4)  # the embedding, then twice a layer
    assert first["hidden"] == second["hidden"]
    assert first["default"] == second["default"]
    assert first["model-parallel-rng"] != second["model-parallel-rng"]


def test_sequence_parallel_ranks(pool, argv):
    flags = "--tensor-model-parallel-size 2 --sequence-parallel"
    first, second = pool.run(2, _draws, [*argv, *flags.split()])
    assert _all_differ(first["attention"], second["attention"])
    assert _all_differ(first["hidden"], second["hidden"])  # of different tokens
    assert first["default"] == second["default"]


def test_replicas_agree_and_masks_of_a_run_differ_from_each_other(pool, argv):
    first, second = pool.run(2, _draws, argv)
    assert len(first["attention"]) == 2 * 4 * 4
    assert first == second
    masks = first["attention"] + first["hidden"]
    assert len(set(masks)) == len(masks)


def test_pipeline_stages_differ(pool, argv):
    first, second = pool.run(2, _draws, [*argv, *"--pipeline-model-parallel-size 2".split()])
    assert _all_differ(first["attention"], second["attention"])


@pytest.mark.parametrize(
    ("recompute", "layout"),
    [
        ("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1", ""),
        ("--recompute-granularity selective", "--tensor-model-parallel-size 2 --sequence-parallel"),
        pytest.param(
            "--recompute-granularity full --recompute-method block --recompute-num-layers 2",
            "--tensor-model-parallel-size 2 --sequence-parallel",
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_recomputation_repeats_the_draw(pool, argv, recompute, layout):
    world_size = 2 if layout else 1
    kept = train(pool, world_size, layout, base=argv, parameters=True)
    assert_same(train(pool, world_size, f"{layout} {recompute}", base=argv, parameters=True), kept)
    assert kept.losses != train(pool, world_size, f"{layout} --hidden-dropout 0", base=argv).losses

"""Grouped GEMM experts against Megatron's sequential ones."""

import json
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from tests.support.one_layer import Layer, Pass, assert_alike, pass_rank, run_layer, skewed
from tests.support.pool import Pool
from tests.support.training import MOCK_DATA, MODEL, RankRun, Run, assert_same, join, train, train_rank

EXPERTS = 8
SLOTS = [[5, -1], [0, 1]]
# Both sum in an order of their own, in float32 but for float64: a few units of rounding, of float32 or of the bfloat16
# that each product and the activation between them is rounded to.
TOLERANCE = {"float32": 1e-6, "bfloat16": 1e-2, "float64": 1e-12}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("slot_expert", [None, SLOTS], ids=["alone", "replicas"])
def test_grouped_is_the_loop_over_experts(pool, dtype, slot_expert):
    loop = Layer(EXPERTS, skewed(2, 64, EXPERTS, 2), slot_expert, dtype=dtype)
    reference, grouped = run_layer(pool, loop), run_layer(pool, replace(loop, grouped=True))
    assert [seen.rows for seen in grouped] == [seen.rows for seen in reference]
    assert_alike(grouped, reference, tolerance=TOLERANCE[dtype])
    assert_alike(run_layer(pool, replace(loop, grouped=True)), grouped, tolerance=None)


def _leave_empty_groups_unset(layer: Layer) -> Pass:
    """On one rank: weight gradients of empty groups are what was in memory, as on B200 (pytorch#172439)."""
    import torch

    product = torch.nn.functional.grouped_mm

    def poisoned(left: torch.Tensor, right: torch.Tensor, *, offs: torch.Tensor) -> torch.Tensor:
        result = product(left, right, offs=offs)
        if result.dim() == 3:
            result[offs.diff(prepend=offs.new_zeros(1)) == 0] = float("nan")
        return result

    torch.nn.functional.grouped_mm = poisoned
    return pass_rank(layer)


@pytest.mark.parametrize("chosen", [[4, 6], [0, 3], [-1, -1]], ids=["homes", "replica", "nothing"])
def test_products_pass_over_empty_groups(pool, chosen):
    layer = Layer(
        EXPERTS,
        [np.full((16, 2), chosen)] * 2,
        [[-1, -1], [3, 1]],
        grouped=True,
        options={"moe_expert_capacity_factor": 8.0},
    )
    expected = run_layer(pool, replace(layer, grouped=False))
    assert_alike(pool.run(2, _leave_empty_groups_unset, layer), expected, tolerance=TOLERANCE["float32"])


def _count_copies(layer: Layer, stored: str, large: int) -> tuple[Pass, int]:
    """On one rank: the pass, and how often weights of several experts are copied into one tensor.

    stored: how the weights of homes are in memory: "as built", or "reversed", as a distributed optimizer has them.
    large: elements of a weight that is not copied.
    """
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    from megatron.balanced.experts import grouped_mlp
    from tests.support import one_layer

    grouped_mlp._LARGE = large
    memory: set[int] = set()
    copies = 0

    class Counted(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal copies
            if func.name() in ("aten::stack", "aten::cat"):  # transfers copy flat tensors
                parts = args[0]
                copies += parts[0].dim() > 1 and any(each.untyped_storage().data_ptr() in memory for each in parts)
            return func(*args, **(kwargs or {}))

    build, fill = one_layer._build, one_layer._fill_slots

    def build_and_store(layer: Layer) -> Any:
        built = build(layer)
        weights = list(built.experts.parameters())
        if stored == "reversed":
            parts = torch.cat([w.detach().reshape(-1) for w in weights[::-1]]).split([w.numel() for w in weights[::-1]])
            for weight, part in zip(weights[::-1], parts, strict=True):
                weight.data = part.view(weight.shape)
        memory.update(w.untyped_storage().data_ptr() for w in weights)
        return built

    def fill_and_note(*args: Any) -> Any:
        slots = fill(*args)
        memory.add(slots._weights.untyped_storage().data_ptr())
        return slots

    one_layer._build, one_layer._fill_slots = build_and_store, fill_and_note
    with Counted():
        return pass_rank(layer), copies


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_are_not_copied(pool, dtype):
    """Two products of homes and two of replicas, forward and backward, make eight copies where each stacks weights."""
    layer = Layer(EXPERTS, skewed(2, 64, EXPERTS, 2), SLOTS, dtype=dtype, grouped=True)
    expected = run_layer(pool, layer)
    for stored, large, copies in (("as built", 1 << 22, 0), ("reversed", 1 << 22, 4), ("reversed", 1, 0)):
        seen = pool.run(2, _count_copies, layer, stored, large)
        assert [count for _, count in seen] == [copies] * 2, (stored, large)
        assert_alike([passed for passed, _ in seen], expected, tolerance=None)


def _stored_as_one() -> list[bool]:
    """Whether weights are taken for one tensor: some that are, and others."""
    import torch

    from megatron.balanced.experts.grouped_mlp import _as_one

    whole = torch.arange(72.0).view(6, 3, 4)
    taken = [
        list(whole),
        list(whole[::2]),
        list(whole[1:4]),
        [whole[2]],
        [whole[n] for n in (2, 1, 0)],
        [whole[n] for n in (0, 1, 3)],
        [whole[0], whole[0]],
        [weight.clone() for weight in whole],
        list(whole.transpose(1, 2)),
    ]
    ones = [_as_one(weights) for weights in taken]
    assert all(one is None or torch.equal(one, torch.stack(parts)) for one, parts in zip(ones, taken, strict=True))
    return [one is not None for one in ones]


def test_weights_that_follow_one_another_are_one_tensor(pool):
    assert pool.run(1, _stored_as_one) == [[True] * 4 + [False] * 5]


ACTIVATIONS = {
    "swiglu, not fused": {"bias_activation_fusion": False},
    "swiglu, clamped": {"bias_activation_fusion": False, "activation_func_clamp_value": 0.5, "glu_linear_offset": 1.0},
    "gelu": {"bias_activation_fusion": False, "gated_linear_unit": False, "activation_func": "gelu"},
    "squared relu": {"bias_activation_fusion": False, "gated_linear_unit": False, "activation_func": "squared_relu"},
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_every_activation_of_megatron(pool, name):
    loop = Layer(EXPERTS, skewed(2, 32, EXPERTS, 2), SLOTS, options=ACTIVATIONS[name])
    assert_alike(run_layer(pool, replace(loop, grouped=True)), run_layer(pool, loop), tolerance=TOLERANCE["float32"])


@pytest.mark.parametrize("shared", [False, True], ids=["resident", "shared"])
def test_experts_and_ranks_without_tokens(pool, shared):
    """Groups of no rows, and products of no rows at all: on rank 0 all experts stay idle, then on both ranks."""
    for chosen in (np.full((16, 2), [4, 6]), np.full((16, 2), -1)):
        loop = Layer(
            EXPERTS, [chosen] * 2, [[-1, -1], [3, 1]], shared=shared, options={"moe_expert_capacity_factor": 8.0}
        )
        reference, grouped = run_layer(pool, loop), run_layer(pool, replace(loop, grouped=True))
        assert sum(grouped[0].rows) == 0
        assert_alike(grouped, reference, tolerance=TOLERANCE["float32"])


def _in_the_place_of_transformer_engines() -> list[str]:
    """Experts of a spec with Transformer Engine's linear layers, built as balancing builds them: their kind and their
    parameters."""
    from functools import partial

    from megatron.core.transformer.mlp import MLPSubmodules
    from megatron.core.transformer.moe.experts import SequentialMLP
    from megatron.core.transformer.moe.moe_layer import MoESubmodules

    from megatron.balanced import model
    from tests.support.one_layer import tiny_config

    theirs = MLPSubmodules(linear_fc1=None, linear_fc2=None)
    spec = MoESubmodules(experts=partial(SequentialMLP, submodules=theirs))
    filled = model._fill_in(spec, {SequentialMLP: model._on_own_linears})
    config, groups = tiny_config()
    built = filled.experts(2, config, pg_collection=groups)
    return [type(built).__name__, *(name for name, _ in built.named_parameters())]


def test_they_stand_in_for_transformer_engines(pool):
    (built,) = pool.run(1, _in_the_place_of_transformer_engines)
    linears = [f"local_experts.{n}.linear_fc{m}.weight" for n in range(2) for m in (1, 2)]
    assert built == ["ReplicatedSequentialMLP", *linears]


MOE = (
    "--swiglu --disable-bias-linear --num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 48 --num-layers 2 "
    "--expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall --train-iters 4"
).split()


def _train_and_count(argv: list[str]) -> tuple[RankRun, int]:
    """On one rank: the run, and how many grouped products it took."""
    import torch

    product, count = torch.nn.functional.grouped_mm, 0

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        return product(*args, **kwargs)

    torch.nn.functional.grouped_mm = counted
    return train_rank(argv, False), count


# ranks, layout, more flags of the grouped run
RUNS = {
    "alone": (2, "", ""),
    "distributed optimizer, overlap": (2, "", "--balance-experts --use-distributed-optimizer --overlap-grad-reduce"),
    "shared slots, recompute": (
        2,
        "",
        "--balance-experts --expert-replica-mode shared --recompute-granularity selective --recompute-modules moe",
    ),
    "ETP 2": (
        4,
        "--tensor-model-parallel-size 2 --expert-tensor-parallel-size 2 --sequence-parallel "
        "--make-vocab-size-divisible-by 64",
        "--balance-experts",
    ),
}


@cache
def _sequential(pool: Pool, ranks: int, layout: str) -> Run:
    return train(pool, ranks, layout, base=[*MODEL, *MOCK_DATA, *MOE])


@pytest.mark.parametrize("case", RUNS)
def test_a_run_with_grouped_experts(pool, tmp_path, case):
    """Losses to the accuracy of float32, against sequential experts without replicas."""
    ranks, layout, more = RUNS[case]
    argv = [*MODEL, *MOCK_DATA, *MOE, *layout.split(), *more.split(), "--moe-grouped-gemm"]
    seen = pool.run(ranks, _train_and_count, [*argv, "--balance-report", str(tmp_path)])
    assert all(count > 0 for _, count in seen), "the experts were not grouped"
    grouped = join([run for run, _ in seen])
    np.testing.assert_allclose(grouped.losses, _sequential(pool, ranks, layout).losses, rtol=2e-6)
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert ("--balance-experts" in argv) == any(event["action"] == "replicate" for event in events)


def test_a_run_with_grouped_experts_repeats_bit_for_bit(pool):
    flags = f"{' '.join(MOE)} --moe-grouped-gemm --balance-experts --bf16"
    first, second = (train(pool, 2, flags, parameters=True) for _ in range(2))
    assert_same(first, second)

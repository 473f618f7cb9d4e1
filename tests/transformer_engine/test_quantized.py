"""Parameters in 8 bits: their scales go where their numbers go, replicas of experts are quantized as their homes, and
documents are spread over ranks that quantize.

Of the kernels' numerics nothing is shown: here as there a scale is the largest number's, of a tensor or of 32 numbers.
"""

import datetime
import hashlib
import os
from typing import Any

import numpy as np
import pytest

from tests.layers.test_move import _assert_same_run, _assert_same_tensors
from tests.support.moving import Plans, moving_rank, train_moving
from tests.support.sampled import sampled
from tests.support.settings import settings, without_settings
from tests.support.training import MODEL, RankRun, differences, join, train_rank
from tests.support.transformer_engine.model import BASE, TE

CAPABILITY = {"tensorwise": (9, 0), "delayed": (9, 0), "blockwise": (9, 0), "mxfp8": (10, 0), "nvfp4": (10, 0)}


def _quantizer(recipe: str) -> Any:
    import torch
    import transformer_engine_torch as tex
    from transformer_engine.pytorch.tensor.float8_blockwise_tensor import Float8BlockQuantizer
    from transformer_engine.pytorch.tensor.float8_tensor import Float8CurrentScalingQuantizer, Float8Quantizer
    from transformer_engine.pytorch.tensor.mxfp8_tensor import MXFP8Quantizer

    kind = tex.DType.kFloat8E4M3
    if recipe == "blockwise":
        return Float8BlockQuantizer(kind, rowwise=True, columnwise=True)
    if recipe == "mxfp8":
        return MXFP8Quantizer(kind)
    if recipe == "delayed":
        return Float8Quantizer(torch.tensor([8.0]), torch.zeros(1), kind)
    return Float8CurrentScalingQuantizer(kind, device=torch.device("cuda"))


def _stored(parameter: Any) -> dict[str, Any]:
    """The tensors that a quantized parameter is made of: numbers in 8 bits, also those in another order, and scales."""
    import torch

    return {name: part for name, part in parameter.get_metadata().items() if isinstance(part, torch.Tensor)}


def _copied(recipe: str, weight: np.ndarray) -> tuple[dict[str, np.ndarray], np.ndarray, np.ndarray]:
    """Rank 0 has the quantized weight, rank 1 memory for it, and both have it after a move. Returns what it is made of,
    its value, and a product with it."""
    import torch
    import torch.distributed as dist
    import transformer_engine.pytorch as te

    from balancing.layers.transfer import Piece, plan_transfers, run_transfers
    from tests.support.transformer_engine.on_cpu import have_capability

    have_capability(*CAPABILITY[recipe])
    dist.init_process_group("gloo")
    dist.barrier()
    rank, quantizer = dist.get_rank(), _quantizer(recipe)
    whole = torch.from_numpy(weight).bfloat16()
    made = quantizer(whole) if rank == 0 else quantizer.make_empty(whole.shape, dtype=torch.bfloat16)
    parameter = torch.nn.Parameter(made)
    flat = {name: part.view(-1) for name, part in _stored(parameter).items()}
    assert any("scale" in name for name in flat)
    transfers = plan_transfers(
        [Piece(name, 0, 0, part.numel()) for name, part in flat.items()],
        [Piece(name, 1, 0, part.numel()) for name, part in flat.items()],
    )

    def part(transfer: Any) -> Any:
        return flat[transfer.tensor][transfer.start : transfer.stop]

    sent = run_transfers(transfers, part, part, dist.group.WORLD, datetime.timedelta(minutes=5))
    assert sent == (sum(part.numel() * part.element_size() for part in flat.values()) if rank == 0 else 0)
    if recipe in ("tensorwise", "delayed"):
        parameter._transpose_invalid = False  # which is no tensor, and so not sent
    linear = te.Linear(*reversed(whole.shape), bias=False, params_dtype=torch.bfloat16, device="cpu")
    linear.weight = parameter
    recipes = {
        "mxfp8": _recipes().MXFP8BlockScaling,
        "blockwise": _recipes().Float8BlockScaling,
        "delayed": _recipes().DelayedScaling,
    }
    rows = torch.linspace(-1, 1, 32 * whole.shape[1]).view(32, -1).bfloat16().requires_grad_()
    with te.autocast(enabled=True, recipe=recipes.get(recipe, _recipes().Float8CurrentScaling)()):
        out = linear(rows)
    out.sum().backward()  # reads the weight in its other order
    held = {name: part.numpy().copy() for name, part in _stored(parameter).items()}
    return held, parameter.dequantize().detach().float().numpy(), torch.cat([out, rows.grad]).float().detach().numpy()


def _recipes() -> Any:
    from transformer_engine.common import recipe

    return recipe


def _format(recipe: str, kind: str) -> str:
    """The flags of a recipe. kind: the number format of one in 8 bits."""
    return "--fp4-format e2m1 --fp4-recipe nvfp4" if recipe == "nvfp4" else f"--fp8-format {kind} --fp8-recipe {recipe}"


@pytest.mark.parametrize("recipe", [recipe for recipe in CAPABILITY if recipe != "nvfp4"])
def test_parameters_are_copied_with_their_scales(engine, recipe):
    weight = np.random.default_rng(0).normal(size=(64, 64)).astype(np.float32)
    weight[:32] *= 100  # another scale for each block
    (own, value, product), (copy, copied_value, copied_product) = engine.run(2, _copied, recipe, weight)
    assert own.keys() == copy.keys()
    for name, part in own.items():
        np.testing.assert_array_equal(copy[name], part, err_msg=name)
    np.testing.assert_array_equal(copied_value, value)
    np.testing.assert_array_equal(copied_product, product)
    # E4M3 has three bits of mantissa. Delayed scaling cuts what its scale of yesterday did not foresee.
    largest = 448 / 8 if recipe == "delayed" else np.inf
    expected = weight.clip(-largest, largest)
    assert np.linalg.norm(value - expected) <= 0.05 * np.linalg.norm(expected)


def _train_quantized(argv: list[str], capability: tuple[int, int]) -> RankRun:
    from tests.support.transformer_engine.on_cpu import have_capability

    have_capability(*capability)
    os.environ["NVTE_CUTEDSL_FUSED_GROUPED_MLP"] = "1"  # without which Megatron-LM does not try fused operations
    return train_rank(argv, True)


DEALT = "--pipeline-model-parallel-size 2 --sequence-micro-batches"
# ranks, recipe, flags
SPREAD = {
    "tensorwise": (2, "tensorwise", "--context-parallel-size 2"),
    "mxfp8": (2, "mxfp8", "--context-parallel-size 2"),
    "tensorwise, micro-batches dealt": (4, "tensorwise", f"--sequence-domain data {DEALT}"),
}


@pytest.mark.parametrize("case", sampled(SPREAD))
def test_documents_spread_over_ranks_that_quantize(model_of, case):
    """Where each rank quantizes the tokens it has, numbers differ a little from those of one rank."""
    ranks, recipe, layout = SPREAD[case]
    model = model_of("--seq-length 64 --max-position-embeddings 64 --hidden-size 128 --num-layers 2")
    packed = "--bf16 --dataloader-inter-document-masking --calculate-per-token-loss"
    flags = f"{packed} --fp8-format hybrid --fp8-recipe {recipe}"
    spread = f"{flags} {layout} --balance-sequences --attention-backend auto"
    capability = CAPABILITY[recipe]
    run = join(model.pool.run(ranks, _train_quantized, model.argv(spread), capability))
    alone = join(model.pool.run(1, _train_quantized, model.argv(flags), capability))
    in_bf16 = model.alone(packed)
    assert alone.losses != in_bf16.losses, "nothing was quantized"
    assert differences(run, alone)[0] <= 0.01
    assert differences(alone, in_bf16)[0] <= 0.05


QUANTIZED = (
    "--swiglu --num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 64 --moe-aux-loss-coeff 1e-2 --hidden-size 64 "
    "--num-layers 2 --bf16 --expert-model-parallel-size 2 --moe-grouped-gemm "
    "--use-distributed-optimizer --overlap-param-gather --overlap-grad-reduce --ddp-bucket-size 20000"
)
STORED = "--fp8-param-gather --reuse-grad-buf-for-mxfp8-param-ag"
FULL_RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
WIDE = "--hidden-size 128 --moe-ffn-hidden-size 128"  # as blocks are
# recipe, flags
REPLICAS = {
    "tensorwise": ("tensorwise", ""),
    "mxfp8": ("mxfp8", ""),
    "mxfp8, slots shared": ("mxfp8", settings("experts", replica_mode="shared")),
    "mxfp8, full recompute": ("mxfp8", FULL_RECOMPUTE),
    "blockwise": ("blockwise", WIDE),
    "blockwise, stored": ("blockwise", f"{WIDE} --fp8-param-gather"),
    "tensorwise, stored": ("tensorwise", "--fp8-param-gather"),
    "mxfp8, stored": ("mxfp8", STORED),
    "mxfp8, stored, fused operations": ("mxfp8", f"{STORED} --use-transformer-engine-op-fuser"),
    "nvfp4": ("nvfp4", "--fp4-param-gather"),
    "mxfp8, stored, slots shared": ("mxfp8", f"{STORED} {settings('experts', replica_mode='shared')}"),
}
Factors = dict[tuple[int, int, bool, int, int], set[bytes]]


def _train_replicas(argv: list[str], capability: tuple[int, int]) -> tuple[RankRun, Factors]:
    """Train this rank. Also returns digests of weights as products read them, by step, layer, whether in a forward pass
    (a backward pass reads them by column), which of a layer's two products, and expert."""
    import transformer_engine_torch as tex

    from balancing.experts.engine.slots import ReplicaSlots
    from tests.support.transformer_engine.quantized import plain

    factors: Factors = {}
    tokens = 32 if capability >= (10, 0) else 16  # that products take together
    step = 0
    expected: list[tuple[int, list[int], bool, int]] = []  # products: layer, experts, forward, number
    begin, acquire, product = ReplicaSlots.begin_step, ReplicaSlots.acquire, tex.te_general_grouped_gemm

    def counted_step(self: ReplicaSlots, *args: Any, **named: Any) -> None:
        nonlocal step
        step += 1
        begin(self, *args, **named)

    def watched_acquire(self: ReplicaSlots, number: int, *, forward: bool) -> None:
        acquire(self, number, forward=forward)
        first = self._rank * self._homes_per_rank
        experts = [*range(first, first + self._homes_per_rank)]
        if self.held(number):
            in_slots = {chain.slot: chain.expert for chain in self._layers[number].chains if chain.slot is not None}
            experts += [in_slots.get(slot, -1) for slot in range(self.slots)]
        expected[:] = [(number, experts, forward, at) for at in range(2)]

    def watched_product(a: Any, transa: bool, b: Any, transb: bool, *rest: Any, **more: Any) -> Any:
        if transa and step:
            assert all(len(plain(rows)) % tokens == 0 for rows in b), "rows are not padded"
        if expected and not transb:
            layer, experts, forward, number = expected.pop(0)
            assert forward == transa
            for weight, expert in zip(a, experts, strict=True):
                if expert >= 0:
                    read = plain(weight, columnwise=not transa).numpy().tobytes()
                    key = step, layer, forward, number, expert
                    factors.setdefault(key, set()).add(hashlib.sha256(read).digest())
        return product(a, transa, b, transb, *rest, **more)

    ReplicaSlots.begin_step, ReplicaSlots.acquire = counted_step, watched_acquire
    tex.te_general_grouped_gemm = watched_product
    return _train_quantized(argv, capability), factors


@pytest.mark.parametrize("case", sampled(REPLICAS, "mxfp8, stored"))
def test_replicas_are_quantized_as_their_homes(engine, corpus, case):
    """Weights are the same on all ranks that have them, bit for bit, and so are losses where each row of tokens has
    scales of its own. Gradients of weights have scales of all tokens of an instance, which differ a little."""
    recipe, flags = REPLICAS[case]
    # Transformer Engine keeps no 16-bit values of quantized parameters that Megatron-LM initializes on the CPU.
    base = [flag for flag in [*MODEL, *corpus, *BASE.split()] if flag != "--use-cpu-initialization"]
    argv = [*base, *f"{TE} {QUANTIZED} {_format(recipe, 'e4m3')} --train-iters 3 {flags}".split()]
    alone = without_settings(" ".join(argv)).replace("--fp4-param-gather", "").split()  # which replicas switch off
    unbalanced = join(engine.run(2, _train_quantized, alone, CAPABILITY[recipe]))
    ranks = engine.run(
        2, _train_replicas, [*argv, *f"--balance-experts {settings('experts', min_gain=0)}".split()], CAPABILITY[recipe]
    )
    run, (_, here), (_, there) = join([rank for rank, _ in ranks]), *ranks
    both = here.keys() & there.keys()
    assert {forward for _, _, forward, *_ in both} == {True, False}
    assert len(both) >= 2 * 2 * 2, "hardly anything was replicated"
    for key in both:
        assert len(here[key]) == 1 and here[key] == there[key], f"{key}: the replica is not its home"
    if recipe in ("mxfp8", "blockwise"):  # nvfp4 has one scale more, of all tokens of an instance
        assert run.losses[:2] == unbalanced.losses[:2]  # the second forward pass is the first with replicas
        assert run.grad_norms[1] == pytest.approx(unbalanced.grad_norms[1], rel=1e-4)
    assert differences(run, unbalanced)[0] <= 0.01
    assert run.losses != unbalanced.losses, "nothing was quantized by instance"


PP2 = "--pipeline-model-parallel-size 2"
SHARDED = f"{PP2} --use-distributed-optimizer --ddp-bucket-size 2000"
OVERLAPS = f"{SHARDED} --overlap-grad-reduce --overlap-param-gather"
PARAMETERS = "--fp8-param-gather"
REUSED = f"{PARAMETERS} --reuse-grad-buf-for-mxfp8-param-ag"
AWARE = "--use-precision-aware-optimizer --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16"
THERE_AND_BACK: Plans = {1: ((1,), (3,)), 3: ((3,), (1,))}

# recipe, ranks, flags
MOVES = {
    "tensorwise": ("tensorwise", 2, PP2),
    "delayed": ("delayed", 2, PP2),
    "mxfp8": ("mxfp8", 2, PP2),
    "blockwise": ("blockwise", 2, PP2),
    "nvfp4": ("nvfp4", 2, PP2),
    "nvfp4, DP 2": ("nvfp4", 4, OVERLAPS),
    "blockwise parameters, DP 2": ("blockwise", 4, f"{OVERLAPS} {PARAMETERS}"),
    "tensorwise parameters, DP 2": ("tensorwise", 4, f"{OVERLAPS} {PARAMETERS}"),
    "delayed parameters": ("delayed", 2, f"{SHARDED} {PARAMETERS}"),
    "delayed parameters, DP 2": ("delayed", 4, f"{OVERLAPS} {PARAMETERS}"),
    "mxfp8 parameters, hybrid": ("mxfp8", 2, f"{OVERLAPS} {REUSED} --hybrid-layer-pattern *-*-*-*-"),
    "mxfp8 parameters, precision-aware": ("mxfp8", 2, f"{SHARDED} {REUSED} {AWARE}"),
    "mxfp8 parameters, precision-aware, DP 2, both overlaps": ("mxfp8", 4, f"{OVERLAPS} {REUSED} {AWARE}"),
}


def _moving_quantized(argv: list[str], plans: Plans) -> Any:
    from tests.support.transformer_engine.on_cpu import gather_bytes, have_capability

    gather_bytes()
    have_capability(*CAPABILITY[argv[argv.index("--fp8-recipe" if "--fp8-recipe" in argv else "--fp4-recipe") + 1]])
    return moving_rank(argv, plans)


@pytest.mark.parametrize(
    "case", sampled(MOVES, "mxfp8 parameters, precision-aware, DP 2, both overlaps", "mxfp8 parameters, hybrid")
)
def test_layers_in_8_bits_move_and_no_number_changes(model_of, case):
    recipe, ranks, flags = MOVES[case]
    model = model_of(f"--hidden-size {128 if recipe == 'blockwise' else 64}")
    argv = model.argv(f"{flags} --bf16 {_format(recipe, 'hybrid')}")
    plans: Plans = {1: ((2,), (6,)), 3: ((6,), (2,))} if "hybrid" in case else THERE_AND_BACK
    moved, state = train_moving(model.pool, ranks, "", plans, base=argv, body=_moving_quantized)
    stayed, expected = train_moving(model.pool, ranks, "", {}, base=argv, body=_moving_quantized)
    _assert_same_run(moved, stayed)
    _assert_same_tensors(state, expected)


# recipe, flags
MOVES_IN_PARTS = {
    "mxfp8, both overlaps": ("mxfp8", f"--overlap-grad-reduce --overlap-param-gather {REUSED} {AWARE}"),
    "blockwise": ("blockwise", f"{WIDE} {PARAMETERS} {AWARE}"),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", MOVES_IN_PARTS)
def test_layers_in_8_bits_and_in_parts_move_and_no_number_changes(engine, corpus, case):
    """As recipes train: messages of experts beside compute, weight gradients behind those of inputs."""
    recipe, flags = MOVES_IN_PARTS[case]
    parts = (
        "--num-layers 5 --pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Et|tt|t|tL "
        "--global-batch-size 8 --moe-token-dispatcher-type alltoall --overlap-moe-expert-parallel-comm "
        "--delay-wgrad-compute --moe-router-padding-for-quantization --moe-shared-expert-intermediate-size 64"
    )
    base = [flag for flag in [*MODEL, *corpus, *BASE.split()] if flag != "--use-cpu-initialization"]
    quantized = QUANTIZED.replace("--overlap-param-gather --overlap-grad-reduce ", "")
    argv = [*base, *f"{TE} {quantized} {_format(recipe, 'e4m3')} {parts} {flags}".split()]
    plans = {1: ((2, 1), (1, 1)), 3: ((1, 1), (1, 2))}
    moved, state = train_moving(engine, 4, "", plans, base=argv, body=_moving_quantized)
    stayed, expected = train_moving(engine, 4, "", {}, base=argv, body=_moving_quantized)
    _assert_same_run(moved, stayed)
    _assert_same_tensors(state, expected)

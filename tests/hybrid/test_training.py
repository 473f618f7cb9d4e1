"""A hybrid model trains in every layout as on one rank, with every balancer, and as the GPT model with its layers."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.sequences.test_packed_documents import PACKED, Packed
from tests.support.events import events_in
from tests.support.moving import train_moving
from tests.support.sampled import sampled
from tests.support.training import MOE, RankRun, Run, assert_close, join, train, train_rank
from tests.together.test_structures import _place_at_random

LOSS = f"{PACKED} --calculate-per-token-loss --eod-mask-loss"
PP2 = "--pipeline-model-parallel-size 2"
EP2 = "--expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall"
OVERLAPS = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 2000"
RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
EXPERTS = f"{' '.join(MOE)} --moe-aux-loss-coeff 1e-2 --moe-router-load-balancing-type seq_aux_loss"
LATENT = "--kv-lora-rank 12 --qk-head-dim 8 --qk-pos-emb-head-dim 4 --v-head-dim 6"
MAMBA = "--mamba-state-dim 8 --mamba-head-dim 8 --mamba-num-groups 2"
BALANCED = f"{LOSS} --balance-sequences"

# Name of a model -> its pattern without segments, and flags.
MODELS = {
    "Mamba": ("M-M*EM-ME*E", f"{EXPERTS} {MAMBA}"),
    "attention": ("*-*E*-*E", EXPERTS),
    "latent": ("+-+E+-+E", f"{EXPERTS} {LATENT}"),
}
# model, ranks, segments, flags, layers of each chunk by iteration
CASES: dict[str, tuple[str, int, str, str, dict[int, Any]]] = {
    "PP 2, EP 2, both overlaps": (
        "attention",
        4,
        "*-*E*|-*E",
        f"{LOSS} {PP2} {EP2} {OVERLAPS} --balance-experts",
        {1: ((2,), (6,)), 3: ((6,), (2,))},
    ),
    "PP 2, two chunks a stage, EP 2, recomputed": (
        "attention",
        4,
        "*-|*E|*-|*E",
        f"{LOSS} {PP2} {EP2} {RECOMPUTE} --balance-experts",
        {1: ((1, 1), (3, 3)), 3: ((4, 1), (2, 1))},
    ),
    # The stage of the last layers has experts and no attention.
    "PP 2, CP 2, EP 2": (
        "attention",
        4,
        "*-*E|*-*E",
        f"{BALANCED} --context-parallel-size 2 {PP2} {EP2} {OVERLAPS} --balance-experts",
        {1: ((7,), (1,)), 3: ((1,), (7,))},
    ),
    "PP 2, CP 2, recomputed, latent attention": (
        "latent",
        4,
        "+-+E+-|+E",
        f"{BALANCED} --context-parallel-size 2 --micro-batch-size 2 {PP2} {RECOMPUTE}",
        {1: ((3,), (5,)), 3: ((7,), (1,))},
    ),
    "Mamba, PP 2, EP 2, both overlaps": (
        "Mamba",
        4,
        "M-M*E|M-ME*E",
        f"{LOSS} {PP2} {EP2} {OVERLAPS} --balance-experts",
        {1: ((2,), (9,)), 3: ((8,), (3,))},
    ),
    "Mamba, PP 2, two chunks a stage, EP 2, recomputed": (
        "Mamba",
        4,
        "M-M|*EM|-ME|*E",
        f"{LOSS} {PP2} {EP2} {RECOMPUTE} --balance-experts",
        {1: ((1, 3), (2, 5)), 3: ((4, 1), (3, 3))},
    ),
    "Mamba, TP 2, sequence parallel, PP 2": (
        "Mamba",
        4,
        "M-M*E|M-ME*E",
        f"{LOSS} {PP2} --tensor-model-parallel-size 2 --sequence-parallel",
        {1: ((2,), (9,)), 3: ((8,), (3,))},
    ),
    # Layers of Mamba on both sides of the cut, with documents whole by an exchange of heads.
    "Mamba, PP 2, CP 2, EP 2": (
        "Mamba",
        4,
        "M-M*E|M-ME*E",
        f"{BALANCED} --context-parallel-size 2 {PP2} {EP2} {OVERLAPS} --balance-experts",
        {1: ((7,), (4,)), 3: ((1,), (10,))},
    ),
    "Mamba, CP 2, PP 2, recomputed": (
        "Mamba",
        4,
        "M-M*E|M-ME*E",
        f"{BALANCED} --context-parallel-size 2 --micro-batch-size 2 {PP2} {RECOMPUTE}",
        {1: ((3,), (8,))},
    ),
    "Mamba, PP 2, DP 2, domain data, micro-batches": (
        "Mamba",
        4,
        "M-M*E|M-ME*E",
        f"{BALANCED} --sequence-domain data --sequence-micro-batches {PP2} {EP2}",
        {1: ((7,), (4,)), 3: ((1,), (10,))},
    ),
    "TP 2, sequence parallel, PP 2": (
        "latent",
        4,
        "+-+E|+-+E",
        f"{LOSS} {PP2} --tensor-model-parallel-size 2 --sequence-parallel",
        {1: ((2,), (6,))},
    ),
}


@pytest.fixture(scope="module")
def models(pool, tmp_path_factory) -> Any:
    """A model by its name, from one start."""

    @cache
    def model(name: str) -> Packed:
        pattern, flags = MODELS[name]
        folder = tmp_path_factory.mktemp(name)
        return Packed(pool, folder, f"{flags} --hybrid-layer-pattern {pattern} --num-layers {len(pattern)}")

    return model


def _placed_rank(argv: list[str], plans: Any) -> Any:
    """The body of one rank, where replicas are drawn."""
    from tests.support.moving import moving_rank

    if "--balance-experts" in argv:
        _place_at_random()
    return moving_rank(argv, plans)


@pytest.mark.parametrize(
    "case",
    sampled(
        CASES,
        "Mamba, PP 2, EP 2, both overlaps",
        "Mamba, TP 2, sequence parallel, PP 2",
        "Mamba, CP 2, PP 2, recomputed",
        "Mamba, PP 2, two chunks a stage, EP 2, recomputed",
    ),
)
def test_layouts_and_balancers_equal_one_rank(models, case):
    name, ranks, segments, flags, plans = CASES[case]
    model = models(name)
    samples = " --micro-batch-size 2" if "--micro-batch-size 2" in flags else ""
    argv = model.from_start(f"{flags} --hybrid-layer-pattern {segments}")
    run, state = train_moving(model.pool, ranks, "", plans, base=argv, body=_placed_rank)
    assert_close(run, model.alone(LOSS + samples))
    assert any(name.startswith("7.") and name.endswith("exp_avg_sq") for name in state)


# The same model of pairs of layers.
GPT = f"{' '.join(MOE)} --num-layers 4 --moe-aux-loss-coeff 1e-2 --moe-router-load-balancing-type aux_loss"
SAME = {
    "MLP": ("*-*-|*-*-", "--num-layers 4 --disable-bias-linear", f"{LOSS} {PP2}"),
    "experts, replicated": (
        "*E*E|*E*E",
        GPT,
        f"{LOSS} {PP2} {EP2} --balance-experts --context-parallel-size 2 --balance-sequences --train-iters 6",
    ),
}


def _named_as_gpt(argv: list[str]) -> RankRun:
    """The body of one rank whose MoE layers have a norm of the name that Megatron-LM's GPT model gives it without
    Transformer Engine."""
    from megatron.balanced.trainer import model

    build = model.local_stack_spec

    def local_stack_spec(config: Any) -> Any:
        spec = build(config)
        names = {"pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"}
        spec.submodules.moe_layer.submodules.sharded_state_dict_keys_map = names
        return spec

    model.local_stack_spec = local_stack_spec
    return train_rank(argv, True)


def _events(folder: Path, balancer: str) -> list[dict[str, Any]]:
    return events_in(folder, balancer=balancer)


@pytest.mark.parametrize("case", sampled(SAME, "experts, replicated"))
def test_a_gpt_model_trains_alike(pool, tmp_path, case):
    """To the same losses, with the same plans, from a checkpoint of the GPT model."""
    pattern, model, flags = SAME[case]
    gpt = Packed(pool, tmp_path, model)
    runs = {}
    for name, more in (("gpt", ""), ("hybrid", f"--hybrid-layer-pattern {pattern}")):
        argv = gpt.from_start(f"{flags} {more} --balance-report {tmp_path / name}")
        runs[name] = join(pool.run(4 if EP2 in flags else 2, _named_as_gpt, argv))
    assert runs["hybrid"].losses == pytest.approx(runs["gpt"].losses, rel=1e-12)
    _assert_same_tensors(runs["hybrid"], runs["gpt"], 4)
    told = [line for line in _events(tmp_path / "hybrid", "layers") if line["unit"] == "layer"]
    names = {"*": "attention", "-": "MLP", "E": "MoE"}
    assert told[-1]["kinds"] == ["embedding", *(names[symbol] for symbol in pattern.replace("|", "")), "head"]
    if "--balance-experts" in flags:
        plans = {name: _events(tmp_path / name, "experts") for name in runs}
        what = ("iteration", "action", "tokens_per_rank", "imbalance_after")
        assert [[line.get(key) for key in what] for line in plans["hybrid"]] == [
            [line.get(key) for key in what] for line in plans["gpt"]
        ]
        assert any(line["action"] == "replicate" for line in plans["gpt"])


def _assert_same_tensors(hybrid: Run, gpt: Run, layers: int) -> None:
    """Each layer of the GPT model is a layer of attention and one of MLP or experts."""
    compared = 0
    for name, whole in gpt.parameters.items():
        if not name.startswith("decoder.layers."):
            other = name.replace("final_layernorm", "final_norm")
            assert abs(hybrid.parameters[other] - whole).max() <= 1e-12
            continue
        path = name.removeprefix("decoder.layers.")
        for number in range(layers):
            place = 2 * number + (not path.startswith(("self_attention", "input_layernorm")))
            assert abs(hybrid.parameters[f"decoder.layers.{place}.{path}"] - whole[number]).max() <= 1e-12, name
            compared += 1
    assert compared == len(hybrid.parameters) - 3 >= 4 * layers


def test_a_pattern_without_segments(models):
    """Its layers are spread evenly, or as the flags of the ends say, as Megatron-LM does it."""
    model = models("attention")
    ends = "--decoder-first-pipeline-num-layers 3 --decoder-last-pipeline-num-layers 5"
    spec = "--spec megatron.core.models.hybrid.hybrid_layer_specs hybrid_stack_spec"  # which is the default
    for flags in (f"{PP2} {spec} --balance-layers", f"{PP2} {ends} --fill-with-weight-gradients"):
        run = train(model.pool, 2, base=model.from_start(f"{LOSS} {flags}"), parameters=True)
        assert_close(run, model.alone(LOSS))


def test_mamba_under_tensor_and_context_parallelism(models):
    """Each rank has some heads of its share of the tensor-parallel ranks' heads. Two ranks share a group of heads."""
    model = models("Mamba")
    flags = "--context-parallel-size 2 --tensor-model-parallel-size 2 --sequence-parallel"
    run = train(model.pool, 4, base=model.from_start(f"{BALANCED} {flags}"), parameters=True)
    assert_close(run, model.alone(LOSS))

"""Experts with PyTorch's grouped products against Megatron-LM's own, and which of them a run has."""

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from balancing.experts.config import ExpertConfig
from balancing.kernels.expert_choice import GemmChoice
from megatron.balanced.trainer.checks.fill import check_fill
from megatron.balanced.trainer.config import BalanceConfig
from tests.experts.test_layer import ADVERSARIAL, EXPERTS
from tests.experts.test_training import BASE, LATE, LAYOUTS, _balanced, _reference
from tests.support.one_layer import Layer, assert_alike, run_layer
from tests.support.sampled import sampled
from tests.support.settings import settings
from tests.support.training import assert_close, train_rank

PLAIN = {"gated_linear_unit": False, "bias_activation_fusion": False}
FORMS: dict[str, dict[str, Any]] = {
    "gated, fused": {},
    "gated, biases": {"bias_activation_fusion": False, "add_bias_linear": True},
    "plain": PLAIN,
    "plain, biases": {**PLAIN, "add_bias_linear": True},
}


@pytest.mark.parametrize(
    "case, form, holds",
    sampled(
        itertools.product(ADVERSARIAL, FORMS, (False, True)),
        ("one expert takes all", "plain, biases", True),
        ("no token at all", "gated, biases", True),
        ("every expert somewhere else", "gated, fused", True),
        ("all tokens of one rank to its own replica", "plain", False),
    ),
)
def test_a_layer_computes_the_same(pool, case, form, holds):
    """Forward and gradients in float64, with experts without tokens. holds: whether slots hold replicas."""
    chosen, slot_expert, options = ADVERSARIAL[case]
    plain = Layer(EXPERTS, chosen, dtype="float64", options={**options, **FORMS[form]})
    slots = slot_expert if holds else [[-1] * len(rank) for rank in slot_expert]
    grouped = Layer(EXPERTS, chosen, slots, dtype="float64", gemm="torch", options=plain.options)
    assert_alike(run_layer(pool, grouped), run_layer(pool, plain), tolerance=1e-12)


@pytest.mark.parametrize(
    "case, mode",
    sampled(
        itertools.product(LATE, ("resident", "shared")),
        ("EP 2, PP 2", "resident"),
        ("overlap", "shared"),
        ("ETP 2", "resident"),
    ),
)
def test_grouped_products_change_no_number(pool, tmp_path, case, mode):
    """Of the run without replicas, which multiplies one expert after the other. Megatron-LM's local experts take
    --moe-grouped-gemm, too."""
    ranks, flags = LATE[case]
    flags += " --moe-token-dispatcher-type alltoall"
    grouped = settings("experts", replica_mode=mode, gemm="torch") + " --moe-grouped-gemm"
    run = _balanced(pool, tmp_path, ranks, flags, grouped)
    assert_close(run, _reference(pool, ranks, flags))


def test_grouped_products_repeat_bit_for_bit_with_late_copies(pool, tmp_path):
    ranks, flags = LAYOUTS["EP 2"]
    flags += " --moe-token-dispatcher-type alltoall"
    given = settings("experts", gemm="torch", late_slots=1, plan_interval=5)
    first, again = (_balanced(pool, tmp_path / name, ranks, flags, given) for name in ("first", "again"))
    assert first.losses == again.losses
    assert_close(first, _reference(pool, ranks, flags))


def _asked_for(argv: list[str]) -> list[tuple[str, str | None, str, int]]:
    """Train as if a measurement chose PyTorch's products. Returns what was asked for."""
    from megatron.balanced.experts import products

    asked = []

    def choose(
        device: Any, sizes: Any, own: str, wanted: str = "auto", *, why_own: str = "", had: str | None = None
    ) -> GemmChoice:
        asked.append((wanted, had, own, sizes.experts))
        return GemmChoice("torch", "experts: chosen", {"torch": 5e14}, "torch")

    products.choose_gemm = choose
    train_rank(argv, False)
    return asked


def test_a_checkpoint_records_the_products_and_a_resumed_run_asks_for_them(pool, tmp_path):
    ranks, flags = LAYOUTS["EP 2"]
    argv = [*BASE, *flags.split(), "--balance-experts", "--train-iters", "2"]
    save = ["--save", str(tmp_path), "--save-interval", "1"]
    assert pool.run(ranks, _asked_for, [*argv, *save]) == [[("auto", None, "sequential", 4 + 2)]] * ranks
    load = ["--load", str(tmp_path), "--ckpt-step", "1"]
    assert pool.run(ranks, _asked_for, [*argv, *load]) == [[("auto", "torch", "sequential", 4 + 2)]] * ranks


@pytest.mark.parametrize("flag", ["fp8", "fp4", "use_transformer_engine_op_fuser", "delay_wgrad_compute"])
def test_modules_that_cannot_have_other_products_say_why(flag):
    from megatron.core.transformer.mlp import MLP

    from megatron.balanced.experts.products import why_own_products

    experts = torch.nn.ModuleList([torch.nn.ModuleList()])
    experts.config = SimpleNamespace(**{flag: True})
    assert flag in why_own_products(experts)
    experts.config = SimpleNamespace()
    assert not why_own_products(experts)
    experts.append(torch.nn.Linear(1, 1))
    assert why_own_products(experts) == "experts have a module of class Linear"
    experts[1] = MLP.__new__(MLP)
    torch.nn.Module.__init__(experts[1])
    assert not why_own_products(experts)
    experts[1].te_quant_params = object()
    assert why_own_products(experts) == "modules have precisions of their own (te_precision_config_file)"
    experts[1].forward = None
    assert why_own_products(experts) == "experts have a module of class MLP"


def test_weight_gradients_in_waits_need_megatrons_products():
    args = SimpleNamespace(skip_train=False, pipeline_model_parallel_size=2)
    config = BalanceConfig(fill_with_weight_gradients=True, experts=ExpertConfig(enabled=True, gemm="torch"))
    with pytest.raises(ValueError, match=r'--fill-with-weight-gradients needs experts.gemm "megatron" or "auto"'):
        check_fill(args, config)

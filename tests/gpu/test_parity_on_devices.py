"""Balanced training on 2 and 4 ranks of a device has the losses of the unbalanced run, within rounding."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.gpu.training import (
    EXPERTS,
    PP2,
    TOLERANCE,
    Orders,
    base,
    difference,
    losses,
    precisions,
    replicated,
    run,
)
from tests.support.corpus import heavy_tailed, write_documents

CP2 = "--context-parallel-size 2"
PACKED = "--dataloader-inter-document-masking --eod-mask-loss"
PLANNERS = ("chunks", "zones", "ring", "gather")


class Differences:
    """The largest difference of each precision, each checked as it comes."""

    def __init__(self) -> None:
        self._largest: dict[str, tuple[float, str]] = {}

    def check(self, precision: str, what: str, found: float) -> None:
        assert found <= TOLERANCE[precision], f"{what}, {precision}: a loss differs by {found:.1e} of the reference"
        self._largest[precision] = max(self._largest.get(precision, (0.0, what)), (found, what))

    def __str__(self) -> str:
        return "; ".join(f"{name}: losses within {found:.1e} ({what})" for name, (found, what) in self._largest.items())


def test_replicas_on_a_device(ranks, device, tmp_path, figure):
    """Replicas of experts in slots of their own, in slots that layers share, and while messages overlap compute."""
    seen = Differences()
    for precision in precisions(device):
        argv = [*base(device, precision), *EXPERTS.split()]
        reference = run(ranks, 2, argv)
        for mode in ("resident", "shared", "shared --overlap-moe-expert-parallel-comm"):
            report = tmp_path / f"{precision}-{mode.replace(' ', '')}"
            balance = f"--balance-experts --expert-min-gain 0 --expert-replica-mode {mode} --balance-report {report}"
            balanced = run(ranks, 2, [*argv, *balance.split()])
            assert replicated(report) > 4, "hardly anything was replicated"
            seen.check(precision, mode, difference(balanced, reference))
    figure(str(seen))


def test_transformer_engines_experts_on_a_device(ranks, device, tmp_path, figure):
    """Replicas as further weights of Transformer Engine's grouped linear layers, in 16 bits and in as few as the GPU
    multiplies, quantized for each step and stored so; on the CPU Megatron-LM's sequential experts."""
    cases = {"one by one" if device == "cpu" else "grouped": ""}
    options: dict[str, Any] = {}
    if device == "cuda":
        pytest.importorskip(
            "transformer_engine.pytorch", reason="Transformer Engine is not installed", exc_type=ImportError
        )
        options = {"precision": "bf16", "layers": "--transformer-impl transformer_engine --moe-grouped-gemm"}
        cases |= _quantizations()
    experts = EXPERTS.replace("--moe-ffn-hidden-size 64", "--moe-ffn-hidden-size 256")
    seen = Differences()
    for number, (name, flags) in enumerate(cases.items()):
        argv = [*base(device, **options), *f"{experts} --use-distributed-optimizer {flags}".split()]
        report = tmp_path / str(number)
        balanced = run(ranks, 2, [*argv, *f"--balance-experts --expert-min-gain 0 --balance-report {report}".split()])
        assert replicated(report) > 4, "hardly anything was replicated"
        precision = "fp8" if flags else options.get("precision", "fp32")
        seen.check(precision, name, difference(balanced, run(ranks, 2, argv)))
    figure(str(seen))


def _quantizations() -> dict[str, str]:
    """Flags of recipes that this GPU has, by name."""
    import torch

    capability = torch.cuda.get_device_capability()
    recipes = ["tensorwise"] if capability >= (8, 9) else []
    recipes += ["blockwise"] if (9, 0) <= capability < (10, 0) else ["mxfp8"] if capability >= (10, 0) else []
    flags = {recipe: f"--fp8-format e4m3 --fp8-recipe {recipe}" for recipe in recipes}
    stored = {
        f"{recipe}, stored": f"{given} --fp8-param-gather"
        + (" --reuse-grad-buf-for-mxfp8-param-ag --overlap-param-gather --overlap-grad-reduce" * (recipe == "mxfp8"))
        for recipe, given in flags.items()
    }
    return flags | stored


def test_documents_on_a_device(ranks, device, tmp_path, figure):
    """Documents spread over two ranks by each planner, against one rank that has them all."""
    longest = 20 if device == "cpu" else 300
    documents = [text[-longest:] for text in heavy_tailed(400, seed=1)]
    if device == "cuda":  # a sequence there has sixteen times as many tokens
        documents = [np.tile(text, 1 + 8 * (number % 2))[:600] for number, text in enumerate(documents)]
    data = " ".join(write_documents(tmp_path / "documents", documents))
    seen = Differences()
    for precision in precisions(device):
        folder = tmp_path / precision
        argv = [*base(device, precision, data), *PACKED.split()]
        save = f"--lr 0 --train-iters 1 --save {folder} --save-interval 1"
        run(ranks, 1, [*argv, *save.split()])  # initial weights depend on the layout
        argv += f"--load {folder} --finetune --no-load-optim --no-load-rng".split()
        reference = run(ranks, 1, argv)
        for planner in PLANNERS if precision == "fp32" else ("auto",):
            flags = f"{CP2} --balance-sequences --sequence-planner {planner}"
            seen.check(precision, planner, difference(run(ranks, 2, [*argv, *flags.split()]), reference))
    figure(str(seen))


def test_moved_layers_on_a_device(ranks, device, figure):
    """A layer moves to the other stage and two move back, with the state of the distributed optimizer."""
    seen = Differences()
    plans = {1: ((3,), (1,)), 3: ((1,), (3,))}
    for precision in precisions(device):
        argv = [*base(device, precision), *f"{PP2} --balance-layers --use-distributed-optimizer".split()]
        reference = run(ranks, 2, argv, Orders({9: ((2,), (2,))}))  # never, where layers would move by measured costs
        moved = run(ranks, 2, argv, Orders(plans, memory=True))
        assert all(len(rank.moves) == 2 for rank in moved), "nothing moved"
        seen.check(precision, "moved", difference(moved, reference))
    figure(str(seen))


def test_early_exit_on_a_device(ranks, device, tmp_path, figure):
    """Where no token is confident enough, losses are those of the whole model; then tokens do leave on the way."""
    data = " ".join(write_documents(tmp_path / "documents", heavy_tailed(400)))
    argv = [*base(device, data=data), *f"{PP2} --early-exit-layers 1,2,3 --early-exit-loss-weight 0.5".split()]
    whole = run(ranks, 2, [*base(device, data=data), *PP2.split()])
    nobody = run(ranks, 2, [*argv, "--early-exit-threshold", "1"])
    found = difference(nobody, whole)
    assert found <= TOLERANCE["fp32"]
    report = f"--early-exit-threshold 0.5 --early-exit-start 1 --balance-report {tmp_path}"
    some = run(ranks, 2, [*argv, *report.split()])
    assert np.isfinite(losses(some)).all()
    left = _share_of_tokens(tmp_path, "early exit")
    assert left < 1, "no token left"
    figure(f"losses within {found:.1e} where none leaves; {left:.0%} of tokens on where some do")


def _share_of_tokens(folder: Path, scheme: str) -> float:
    """The least share of tokens that a layer was run for."""
    events = map(json.loads, (folder / "events.jsonl").read_text().splitlines())
    tokens = [(event["tokens"], event["tokens_all"]) for event in events if event.get("scheme") == scheme]
    return min(float(np.min(np.divide(run_for, of))) for run_for, of in tokens)


def test_all_balancers_on_a_device(ranks, device, tmp_path, figure):
    """All three in one run: with Transformer Engine's layers on a GPU, on the CPU with Megatron's own."""
    engine = "--transformer-impl transformer_engine"
    if device == "cuda":
        pytest.importorskip(
            "transformer_engine.pytorch", reason="Transformer Engine is not installed", exc_type=ImportError
        )
    precision = "bf16" if device == "cuda" else "fp32"
    data = " ".join(write_documents(tmp_path / "documents", heavy_tailed(400, seed=1)))
    layers: dict[str, Any] = {"layers": engine} if device == "cuda" else {}
    argv = [*base(device, precision, data, **layers), *PACKED.split(), *EXPERTS.split(), *PP2.split()]
    start = tmp_path / "start"
    run(ranks, 2 * 2, [*argv, *f"--lr 0 --train-iters 1 --save {start} --save-interval 1".split()])
    argv += f"--load {start} --finetune --no-load-optim --no-load-rng".split()
    reference = run(ranks, 4, argv)
    balance = f"{CP2} --balance-sequences --balance-experts --expert-min-gain 0 --balance-layers"
    report = f"--balance-report {tmp_path / 'report'}"
    balanced = run(ranks, 4, [*argv, *balance.split(), *report.split()], Orders({2: ((1,), (3,))}, memory=True))
    assert replicated(tmp_path / "report") > 4, "hardly anything was replicated"
    assert all(len(rank.moves) == 1 for rank in balanced), "nothing moved"
    found = difference(balanced, reference)
    assert found <= TOLERANCE[precision]
    figure(f"{precision}: losses within {found:.1e}")

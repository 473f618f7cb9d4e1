"""Training on a device has the losses of the same run on CPUs, and balanced training those of the unbalanced run."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.gpu.ranks import OnCpu
from tests.gpu.training import (
    EXPERTS,
    PP2,
    TOLERANCE,
    Orders,
    Told,
    base,
    difference,
    losses,
    precisions,
    replay_rank,
    replicated,
    run,
)
from tests.megatron.test_host_waits import ALLOWED
from tests.support.corpus import heavy_tailed, write_documents
from tests.support.pool import REPOSITORY
from tests.support.settings import scheme_flags, settings

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


# What one rank can train, by name: flags, and those of the data.
ONE_RANK = {
    "packed documents": PACKED,
    "experts": EXPERTS.replace("--expert-model-parallel-size 2", ""),
    "pruning": scheme_flags(prune_sparsity=0.8, prune_start=1, prune_end=3, prune_interval=1, prune_sparse_density=0.6),
    "sparse attention": scheme_flags(sparse_attention="hash", sparse_attention_block=8, sparse_attention_keep=2),
    "mixture of depths": scheme_flags(mixture_of_depths=0.5),
}


def test_one_rank_on_a_device(ranks, pool, device, tmp_path, figure):
    """The same weights and data: losses are those of a CPU, and on a GPU this package makes the host wait nowhere but
    where tests/megatron/test_host_waits.py says why. Experts in bf16, too."""
    data = " ".join(write_documents(tmp_path / "documents", heavy_tailed(400, seed=1)))
    on_cpu = OnCpu(pool)
    for name, flags in ONE_RANK.items():
        folder = tmp_path / name.replace(" ", "-")
        shape = [*base(device, data=data), *flags.split(), "--device", "cpu"]
        run(on_cpu, 1, [*shape, *f"--lr 0 --train-iters 1 --save {folder} --save-interval 1".split()])
        shape += f"--load {folder} --finetune --no-load-optim --no-load-rng --balance-report {folder}/report".split()
        reference = run(on_cpu, 1, shape)
        seen = []
        for precision in ("fp32", "bf16") if device == "cuda" and name == "experts" else ("fp32",):
            argv = [*shape, "--device", device, *(["--bf16"] if precision == "bf16" else [])]
            (told,) = found = run(ranks, 1, argv)
            apart = difference(found, reference)
            assert apart <= TOLERANCE[precision], f"{name}, {precision}: losses differ by {apart:.1e} from a CPU's"
            seen.append(f"{precision} within {apart:.1e}")
            files = {wait.rpartition(":")[0].removeprefix(f"{REPOSITORY}/") for wait in told.waits}
            ours = {file for file in files if file.startswith(("balancing/", "examples/", "megatron/balanced/"))}
            assert ours <= {place.partition(":")[0] for place, _ in ALLOWED}, f"the host waits in {ours}"
        figure(f"{name}: {', '.join(seen)}, {len(told.waits)} waits, {told.launches} kernels, {_cost(told)}")


def _cost(told: Told) -> str:
    peak = f", {told.peak / 2**20:.0f} MiB" if told.peak else ""
    return f"{1e3 * told.seconds:.0f} ms an iteration{peak}"


def _replayed(ranks: Any, pool: Any, device: str, folder: Path, flags: str, orders: Orders, figure: Any) -> list[Told]:
    """Train on 2 CPU ranks and note what each receives; then each rank alone on the device, with what was noted. On the
    last stage losses must be the same. Returns what the ranks told of the recorded run."""
    on_cpu = OnCpu(pool)
    data = " ".join(write_documents(folder / "documents", heavy_tailed(400, seed=1)))
    argv = [*base(device, data=data), *flags.split(), "--device", "cpu"]
    run(on_cpu, 2, [*argv, *f"--lr 0 --train-iters 1 --save {folder} --save-interval 1".split()])
    argv += f"--load {folder} --finetune --no-load-optim --no-load-rng".split()
    recorded = run(on_cpu, 2, argv, replace(orders, record=folder))
    for rank, theirs in enumerate(recorded):
        ours = ranks.run(1, replay_rank, [*argv, "--device", device], replace(orders, played=folder), rank, 2)[0]
        pairs = list(zip(ours.losses, theirs.losses, strict=True))
        apart = max((abs(one - other) / other for one, other in pairs), default=0.0)
        assert apart <= (TOLERANCE["fp32"] if device == "cuda" else 0), f"rank {rank}: losses differ by {apart:.1e}"
        assert device == "cuda" or ours.weights == theirs.weights, f"rank {rank}: weights differ"
        assert len(ours.moves) == len(theirs.moves)
        figure(f"rank {rank}: losses within {apart:.1e}, {ours.launches} kernels, {_cost(ours)}")
    return recorded


def test_replayed_experts(ranks, pool, device, tmp_path, figure):
    report = f"--balance-report {tmp_path}/report"
    flags = f"{EXPERTS} --balance-experts {settings('experts', min_gain=0)} {report}"
    _replayed(ranks, pool, device, tmp_path, flags, Orders(), figure)
    assert replicated(tmp_path / "report") > 4, "hardly anything was replicated"


def test_replayed_sequences(ranks, pool, device, tmp_path, figure):
    told = _replayed(ranks, pool, device, tmp_path, f"{PACKED} {CP2} --balance-sequences", Orders(), figure)
    assert losses(told)


def test_replayed_layers(ranks, pool, device, tmp_path, figure):
    flags = f"{PP2} --balance-layers --use-distributed-optimizer"
    orders = Orders({1: ((3,), (1,)), 3: ((1,), (3,))}, memory=True)
    told = _replayed(ranks, pool, device, tmp_path, flags, orders, figure)
    assert all(len(rank.moves) == 2 for rank in told), "nothing moved"


def test_replicas_on_a_device(ranks, device, tmp_path, figure):
    """Replicas of experts in slots of their own, in slots that layers share, and while messages overlap compute."""
    seen = Differences()
    for precision in precisions(device):
        argv = [*base(device, precision), *EXPERTS.split()]
        reference = run(ranks, 2, argv)
        overlapped = "shared", "--overlap-moe-expert-parallel-comm"
        for mode, flags in (("resident", ""), ("shared", ""), overlapped) if precision == "fp32" else (overlapped,):
            report = tmp_path / f"{precision}-{mode}{flags}"
            balance = f"--balance-experts {settings('experts', min_gain=0, replica_mode=mode)} {flags}"
            balance += f" --balance-report {report}"
            balanced = run(ranks, 2, [*argv, *balance.split()])
            assert replicated(report) > 4, "hardly anything was replicated"
            seen.check(precision, f"{mode} {flags}".strip(), difference(balanced, reference))
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
        balanced = run(
            ranks, 2, [*argv, *f"--balance-experts {settings('experts', min_gain=0)} --balance-report {report}".split()]
        )
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
        for planner in PLANNERS if precision == "fp32" else ("chunks",):
            flags = f"{CP2} --balance-sequences {settings('sequences', planner=planner)}"
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
    argv = [
        *base(device, data=data),
        *f"{PP2} {scheme_flags(early_exit_layers=[1, 2, 3], early_exit_loss_weight=0.5)}".split(),
    ]
    whole = run(ranks, 2, [*base(device, data=data), *PP2.split()])
    nobody = run(ranks, 2, [*argv, *scheme_flags(early_exit_threshold=1).split()])
    found = difference(nobody, whole)
    assert found <= TOLERANCE["fp32"]
    report = f"{scheme_flags(early_exit_threshold=0.5, early_exit_start=1)} --balance-report {tmp_path}"
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
    balance = f"{CP2} --balance-sequences --balance-experts {settings('experts', min_gain=0)} --balance-layers"
    report = f"--balance-report {tmp_path / 'report'}"
    balanced = run(ranks, 4, [*argv, *balance.split(), *report.split()], Orders({2: ((1,), (3,))}, memory=True))
    assert replicated(tmp_path / "report") > 4, "hardly anything was replicated"
    assert all(len(rank.moves) == 1 for rank in balanced), "nothing moved"
    found = difference(balanced, reference)
    assert found <= TOLERANCE[precision]
    figure(f"{precision}: losses within {found:.1e}")

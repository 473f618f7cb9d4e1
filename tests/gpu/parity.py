"""Training on a device has the losses that a CPU had, and balanced training those of the unbalanced run, which is made
twice to know its noise."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from tests.gpu.references import recorded
from tests.gpu.routes import first_flip, flipped
from tests.gpu.training import (
    EXPERTS,
    PP2,
    REORDERED,
    TOLERANCE,
    Comparison,
    Orders,
    apart,
    base,
    losses,
    precisions,
    replicated,
    run,
)
from tests.gpu.trial import Trial
from tests.support.corpus import heavy_tailed
from tests.support.pool import REPOSITORY
from tests.support.settings import scheme_flags, settings

CP2 = "--context-parallel-size 2"
PACKED = "--dataloader-inter-document-masking --eod-mask-loss"
PLANNERS = ("chunks", "zones", "ring", "gather")

# What one rank can train, by name: its flags.
ONE_RANK = {
    "packed documents": PACKED,
    "experts on one rank": EXPERTS.replace("--expert-model-parallel-size 2", ""),
    "pruning": scheme_flags(prune_sparsity=0.8, prune_start=1, prune_end=3, prune_interval=1, prune_sparse_density=0.6),
    "sparse attention": scheme_flags(sparse_attention="hash", sparse_attention_block=8, sparse_attention_keep=2),
    "mixture of depths": scheme_flags(mixture_of_depths=0.5),
}
# Unbalanced runs whose losses on a CPU are kept: ranks, flags.
UNBALANCED = {
    **{name: (1, flags) for name, flags in ONE_RANK.items()},
    "experts": (2, EXPERTS),
    "layers": (2, f"{PP2} --use-distributed-optimizer"),
}


def _documents(trial: Trial, shape: str = "") -> str:
    """The flags of documents of very different length. shape: the device whose model reads them."""
    shape = shape or trial.device
    documents = [text[-(20 if shape == "cpu" else 300) :] for text in heavy_tailed(400, seed=1)]
    if shape == "cuda":  # a sequence there has sixteen times as many tokens
        documents = [np.tile(text, 1 + 8 * (number % 2))[:600] for number, text in enumerate(documents)]
    return trial.write_documents(documents, f"documents-{shape}")


def unbalanced(name: str, trial: Trial, precision: str = "fp32", shape: str = "") -> list[str]:
    """The command line of a run of `UNBALANCED`."""
    data = {"data": _documents(trial, shape)} if name in ONE_RANK else {}
    return [*base(trial.device, precision, shape=shape, **data), *UNBALANCED[name][1].split()]


def _compared(trial: Trial, name: str, precision: str, argv: list[str], orders: Orders) -> Comparison:
    """With an unbalanced run, made twice, and in fp32 with a CPU's losses of it."""
    ranks, _ = UNBALANCED[name]
    reference, again = (
        run(trial, ranks, argv, orders, what=f"{precision}, {which}") for which in ("reference", "again")
    )
    kept = recorded(name, trial.device) if precision == "fp32" else ()
    return Comparison(trial, precision, reference, again, kept)


def _allowed() -> set[str]:
    """Files in which the host may wait for the device."""
    from tests.megatron.test_host_waits import ALLOWED

    return {place.partition(":")[0] for place, _ in ALLOWED}


def one_rank(trial: Trial) -> None:
    """The same weights and data: losses are those of a CPU, and on a GPU this package makes the host wait nowhere but
    where tests/megatron/test_host_waits.py says why. Experts in bf16, too."""
    (allowed,) = trial.run(1, _allowed)
    for name in ONE_RANK:
        argv = [*unbalanced(name, trial), "--balance-report", str(trial.folder / name[:5])]
        kept, seen = recorded(name, trial.device), []
        for precision in ("fp32", "bf16") if trial.device == "cuda" and name.startswith("experts") else ("fp32",):
            found = run(trial, 1, [*argv, *(["--bf16"] if precision == "bf16" else [])], what=f"{name}, {precision}")
            (told,) = found
            off = apart(losses(found), kept)
            ours, theirs = (" ".join(f"{loss:.6f}" for loss in of) for of in (losses(found), kept))
            trial.detail(f"{name}, {precision}: losses {ours}, a CPU's {theirs}")
            assert not (precision == "fp32" and told.rounding), f"{told.rounding} multiplies in TF32"
            assert max(off) <= TOLERANCE[precision], f"{name}, {precision}: {max(off):.1e} from a CPU's, {off}"
            seen.append(f"{precision} within {max(off):.1e}")
            places = Counter(wait.removeprefix(f"{REPOSITORY}/") for wait in told.waits)
            trial.detail(f"{name}, {precision}: the host waits in {_places(places)}")
            files = {wait.rpartition(":")[0].removeprefix(f"{REPOSITORY}/") for wait in told.waits}
            ours_wait = {file for file in files if file.startswith(("balancing/", "examples/", "megatron/balanced/"))}
            assert ours_wait <= allowed, f"the host waits in {ours_wait}"
            cost = f"{len(told.waits)} waits, {told.launches} kernels, {1e3 * told.seconds[-1]:.0f} ms an iteration"
        trial.figure(f"{name}: {', '.join(seen)}, {cost}" + f", {told.peak / 2**20:.0f} MiB" * bool(told.peak))


def _places(counted: Counter[str]) -> str:
    """Where the host waited for the device in the last iteration, by how often."""
    return ", ".join(f"{place} {count} times" for place, count in counted.most_common()) or "no place"


def replicas(trial: Trial) -> None:
    """Replicas of experts against none on this device: in slots of their own, in slots that layers share, and while
    messages overlap compute. First every token goes to the experts of one recorded run, so that sums in another order
    are all that differs. Then routes are free, and losses are compared until the first route flips, which happens where
    two scores are equal but for rounding. A CPU's losses are compared in the first iteration, before routes can flip
    that its record does not have."""
    overlapped = "shared", "--overlap-moe-expert-parallel-comm"
    modes = [("resident", ""), ("shared", ""), overlapped]
    kinds: dict[str, Any] = {"fp32": modes, **({"bf16": [overlapped]} if trial.device == "cuda" else {})}
    for precision, balanced in kinds.items():
        argv = unbalanced("experts", trial, precision)

        def train(what: str, orders: Orders, flags: str = "", argv: Any = argv, precision: str = precision) -> Any:
            return run(trial, 2, [*argv, *flags.split()], orders, what=f"{precision}, {what}")

        free = Orders(routes=True)
        reference, again = train("reference", free), train("again", free)
        kept = recorded("experts", trial.device)[:1] if precision == "fp32" else ()
        fixed = Orders(routes=True, replayed=tuple(rank.routes for rank in reference))
        for routes, orders in {"fixed": fixed, "free": free}.items():
            if orders is fixed:
                unmoved, repeated = train("reference, routes fixed", fixed), train("again, routes fixed", fixed)
                seen = Comparison(trial, precision, unmoved, repeated)
            else:
                unmoved, seen = reference, Comparison(trial, precision, reference, again, kept)
            flips = [] if orders is fixed else [f"again {_flips(again, reference)}"]
            for mode, flags in balanced:
                name = f"{mode} {flags}".strip() + f", routes {routes}"
                report = trial.folder / f"{precision}-{mode}{flags}-{routes}"
                balance = f"--balance-experts {settings('experts', min_gain=0, replica_mode=mode)} {flags}"
                told = train(name, orders, f"{balance} --balance-report {report}")
                assert replicated(report) > 4, "hardly anything was replicated"
                same = first_flip(told, unmoved, len(losses(unmoved)))
                flips.append(f"{name} {_flips(told, unmoved)}")
                trial.detail(f"{precision}: routes that flip by iteration, {flips[-1]}")
                assert orders is free or same == len(losses(unmoved)), "a route that is fixed flipped"
                within = REORDERED if orders is fixed and precision == "fp32" else 0.0
                seen.check(name, told, within=within, iterations=same)
            seen.figure()
            if orders is free:
                trial.figure(f"{precision}: routes that flip {'; '.join(flips)}")


def _flips(told: Any, reference: Any) -> str:
    counts, of = flipped(told, reference, len(losses(reference)))
    return f"{' '.join(map(str, counts))} of {of}"


def transformer_engines_experts(trial: Trial) -> None:
    """Replicas as further weights of Transformer Engine's grouped linear layers, in 16 bits and in as few as the GPU
    multiplies, quantized for each step and stored so; on the CPU Megatron-LM's sequential experts."""
    cases = {"one by one" if trial.device == "cpu" else "grouped": ""}
    options: dict[str, Any] = {}
    if trial.device == "cuda":
        options = {"precision": "bf16", "layers": "--transformer-impl transformer_engine --moe-grouped-gemm"}
        cases |= trial.run(1, _quantizations)[0]
    experts = EXPERTS.replace("--moe-ffn-hidden-size 64", "--moe-ffn-hidden-size 256")
    orders = Orders(drawn=False)  # quantized weights are the engine's to make
    for number, (name, flags) in enumerate(cases.items()):
        argv = [*base(trial.device, **options), *f"{experts} --use-distributed-optimizer {flags}".split()]
        report = trial.folder / str(number)
        reference = run(trial, 2, argv, orders, what=f"{name}, reference")
        again = reference if flags else run(trial, 2, argv, orders, what=f"{name}, again")
        seen = Comparison(trial, "fp8" if flags else options.get("precision", "fp32"), reference, again)
        balance = f"--balance-experts {settings('experts', min_gain=0)} --balance-report {report}"
        balanced = run(trial, 2, [*argv, *balance.split()], orders, what=name)
        assert replicated(report) > 4, "hardly anything was replicated"
        seen.check(name, balanced)
        seen.figure()


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


def documents(trial: Trial) -> None:
    """Documents spread over two ranks by each planner, against one rank that has them all."""
    for precision in precisions(trial.device):
        argv = unbalanced("packed documents", trial, precision)
        seen = _compared(trial, "packed documents", precision, argv, Orders())
        for planner in PLANNERS if precision == "fp32" else ("chunks",):
            flags = f"{CP2} --balance-sequences {settings('sequences', planner=planner)}"
            seen.check(planner, run(trial, 2, [*argv, *flags.split()], what=f"{precision}, {planner}"))
        seen.figure()


def moved_layers(trial: Trial) -> None:
    """A layer moves to the other stage and two move back, with the state of the distributed optimizer."""
    for precision in precisions(trial.device):
        argv = [*unbalanced("layers", trial, precision), "--balance-layers"]
        never = Orders({9: ((2,), (2,))})  # where layers would move by measured costs
        seen = _compared(trial, "layers", precision, argv, never)
        moved = run(trial, 2, argv, Orders({1: ((3,), (1,)), 3: ((1,), (3,))}, memory=True), what=f"{precision}, moved")
        assert all(len(rank.moves) == 2 for rank in moved), "nothing moved"
        seen.check("moved", moved)
        seen.figure()


def early_exit(trial: Trial) -> None:
    """Where no token is confident enough, losses are those of the whole model; then tokens do leave on the way."""
    data = trial.write_documents(heavy_tailed(400))
    argv = [
        *base(trial.device, data=data),
        *f"{PP2} {scheme_flags(early_exit_layers=[1, 2, 3], early_exit_loss_weight=0.5)}".split(),
    ]
    plain = [*base(trial.device, data=data), *PP2.split()]
    whole, again = (run(trial, 2, plain, what=which) for which in ("whole model", "again"))
    seen = Comparison(trial, "fp32", whole, again)
    seen.check(
        "nobody leaves", run(trial, 2, [*argv, *scheme_flags(early_exit_threshold=1).split()], what="nobody leaves")
    )
    seen.figure()
    report = f"{scheme_flags(early_exit_threshold=0.5, early_exit_start=1)} --balance-report {trial.folder}"
    some = run(trial, 2, [*argv, *report.split()], what="some leave")
    assert np.isfinite(losses(some)).all()
    left = _share_of_tokens(trial.folder, "early exit")
    assert left < 1, "no token left"
    trial.figure(f"{left:.0%} of tokens on where some leave")


def _share_of_tokens(folder: Path, scheme: str) -> float:
    """The least share of tokens that a layer was run for."""
    events = map(json.loads, (folder / "events.jsonl").read_text().splitlines())
    tokens = [(event["tokens"], event["tokens_all"]) for event in events if event.get("scheme") == scheme]
    return min(float(np.min(np.divide(run_for, of))) for run_for, of in tokens)


def all_balancers(trial: Trial) -> None:
    """All three in one run: with Transformer Engine's layers on a GPU, on the CPU with Megatron's own."""
    precision = "bf16" if trial.device == "cuda" else "fp32"
    layers: dict[str, Any] = {"layers": "--transformer-impl transformer_engine"} if trial.device == "cuda" else {}
    data = _documents(trial)
    argv = [*base(trial.device, precision, data, **layers), *PACKED.split(), *EXPERTS.split(), *PP2.split()]
    reference, again = (run(trial, 4, argv, what=which) for which in ("reference", "again"))
    seen = Comparison(trial, precision, reference, again)
    balance = f"{CP2} --balance-sequences --balance-experts {settings('experts', min_gain=0)} --balance-layers"
    report = f"--balance-report {trial.folder / 'report'}"
    moved = Orders({2: ((1,), (3,))}, memory=True)
    balanced = run(trial, 4, [*argv, *balance.split(), *report.split()], moved, what="all three")
    assert replicated(trial.folder / "report") > 4, "hardly anything was replicated"
    assert all(len(rank.moves) == 1 for rank in balanced), "nothing moved"
    seen.check("all three", balanced)
    seen.figure()

"""NVIDIA's functional training configurations with every balancer that applies equal those runs without balancers.

The configurations (benchmarks/recipes) are shrunk for a CPU (tests/support/shrink.py); those that are equal then run
once. What a balancer refuses is in `REFUSED`, what cannot run here in `CANNOT_RUN`; a dry run of every configuration
for GPUs, with all of its flags, tells whether the first list is right.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.support.patience import PATIENCE
from tests.support.pool import Pool
from tests.support.recipe_files import Recipe, read_recipes
from tests.support.recipes import BALANCERS, Verdict, command_line, verdicts
from tests.support.sampled import sampled
from tests.support.shrink import LEFT_OUT, Small, for_cpu, shrink
from tests.support.stand_ins import gated_delta_net, offloaded_activations
from tests.support.training import MOCK_DATA, RankRun, Run, differences, join, train_rank
from tests.together.test_structures import _place_at_random

REPOSITORY = Path(__file__).resolve().parents[2]
SUPPORT = REPOSITORY / "docs/recipes.md"
RECIPES = REPOSITORY / "benchmarks/recipes/functional.json"
EXPERTS, LAYERS, SEQUENCES = BALANCERS
TOLERANCE = 1e-12  # in float64
SINGLE_TOLERANCE = 1e-5, 1e-4  # in float32, of losses and parameters
MOVES_AT = 1  # iteration from 0

# Balancer -> the flags of these configurations that it refuses -> why, in the words of a run.
REFUSED: dict[str, dict[str, str]] = {
    EXPERTS: {
        "--use-megatron-fsdp": "it shards the parameters of a layer over ranks",
    },
    LAYERS: {
        "--ckpt-assume-constant-structure": "it saves by the plan of the first save, and layers change ranks",
    },
    SEQUENCES: {
        "--attention-dropout 0.1": "it drops other attention scores than a run on one rank",
        "--moe-router-load-balancing-type sinkhorn": "it routes a token by the others on its rank",
    },
}
# Flags that Megatron-LM 0.19.2 itself refuses.
UPSTREAM = ("--use-megatron-fsdp --ckpt-format torch_dist",)
# Flags that a balancer accepts and nothing runs with here -> why.
CANNOT_RUN: dict[str, str] = {
    "--optimizer dist_muon": "Megatron-LM's layer-wise optimizer wants bf16; tests/layers/test_optimizers.py runs it",
    "--fine-grained-activation-offloading --mtp-num-layers 1": (
        "Megatron-LM 0.19.2 itself fails on a chunk that has one layer, here that of multi-token prediction"
    ),
    "--experimental-attention-variant dsa": "its kernels are for GPUs and in bf16",
    "--fp8-format hybrid": "what is rounded together follows from the layout; tests/transformer_engine compares it",
    "--moe-token-dispatcher-type flex": "its packages are for GPUs; tests/experts runs it on stand-ins",
    "--defer-embedding-wgrad-compute": "it needs fused gradient accumulation, which a CPU does not have",
}
_DEFAULTS = {"attention_dropout": 0.1, "fp8_recipe": "delayed"}  # Megatron-LM's


@dataclass(frozen=True)
class Case:
    """Configurations that are equal once they are shrunk."""

    names: tuple[str, ...]
    small: Small
    environment: Mapping[str, str]

    @property
    def name(self) -> str:
        return self.names[0]


@cache
def cases() -> dict[str, Case]:
    """Name of the first of equal configurations -> all of them."""
    found: dict[str, Case] = {}
    for recipe in read_recipes(RECIPES):
        name = recipe.name.rpartition("/")[2]
        small = shrink(recipe.flags, recipe.ranks)
        before = found.get(small.key)
        names = (*before.names, name) if before else (name,)
        found[small.key] = Case(names, small, recipe.environment)
    return {case.name: case for case in found.values()}


def _has(small: Small, flags: str) -> bool:
    """Whether a configuration has flags, given as a balancer names them, or has none where they are the default."""
    return all(_has_one(small, flag) for flag in flags.removeprefix("--").split(" --"))


def _has_one(small: Small, flag: str) -> bool:
    name, _, value = flag.partition(" ")
    name = name.replace("-", "_")
    given = small.flags.get(name, _DEFAULTS.get(name, False))
    return value in given if isinstance(given, list) else str(given) == (value or "True")


def applicable(small: Small) -> tuple[str, ...]:
    """The balancers that have something to balance."""
    flags = small.flags
    layers = flags["num_layers"] > flags.get("pipeline_model_parallel_size", 1) > 1
    which = {
        EXPERTS: "num_experts" in flags and flags.get("expert_model_parallel_size", 1) > 1,
        LAYERS: layers,
        SEQUENCES: flags.get("context_parallel_size", 1) > 1,
    }
    return tuple(balancer for balancer, has in which.items() if has)


def accepted(small: Small) -> tuple[str, ...]:
    """The balancers that have something to balance and do not refuse it."""
    return tuple(balancer for balancer in applicable(small) if not any(_has(small, flag) for flag in REFUSED[balancer]))


def runs() -> dict[str, tuple[Small, tuple[str, ...]]]:
    """Name of a configuration -> what ranks here run of it, and the balancers; once for all that are equal then."""
    found: dict[Any, tuple[str, Small, tuple[str, ...]]] = {}
    for name, case in cases().items():
        balancers = accepted(case.small)
        if balancers and not any(_has(case.small, flag) for flag in CANNOT_RUN):
            small = for_cpu(case.small, spreads=SEQUENCES in balancers)
            found.setdefault((small.key, balancers), (name, case.small, balancers))
    return {name: (small, balancers) for name, small, balancers in found.values()}


# Runs.


def _move_one_layer() -> list[tuple[tuple[int, ...], ...]]:
    """At one iteration, have a chunk give a layer to the next. Returns the layers of each chunk before and after."""
    from balancing.pipeline.stage_plan import StagePlan
    from megatron.balanced.layers import balancer as layers

    seen: list[tuple[tuple[int, ...], ...]] = []

    def between_steps(self: Any, step: int) -> None:
        self.iteration = step
        if step != MOVES_AT:
            return
        before = self.mover.plan
        stages, chunks = len(before.chunks), len(before.chunks[0])
        counts = [len(chunk) for chunk in before.order]
        giver = max(range(len(counts)), key=counts.__getitem__)
        taker = giver + 1 if giver + 1 < len(counts) else giver - 1
        counts[giver] -= 1
        counts[taker] += 1
        after = tuple(tuple(counts[chunk * stages + stage] for chunk in range(chunks)) for stage in range(stages))
        self.move_to(StagePlan.from_counts(after))
        seen.extend([tuple(tuple(map(len, stage)) for stage in before.chunks), after])

    layers.LayerBalancer.between_steps = between_steps
    return seen


def _rank(flags: dict[str, Any], balancers: tuple[str, ...], extra: list[str]) -> tuple[RankRun, bool, bool]:
    """The body of one rank. Returns the run, whether it had replicas of experts, and whether layers moved."""
    import argparse

    from megatron.training.arguments import add_megatron_arguments

    from megatron.balanced.trainer.arguments import add_balance_flags

    parser = add_balance_flags(add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False)))
    argv, _ = command_line(Recipe("", flags), parser)
    planned = _place_at_random() if EXPERTS in balancers else {}
    moved = _move_one_layer() if LAYERS in balancers else []
    if flags.get("experimental_attention_variant") == "gated_delta_net":
        gated_delta_net.install()
    if flags.get("fine_grained_activation_offloading"):
        offloaded_activations.install()
    run = train_rank([*argv, *extra, *balancers], True)
    return run, any(used for _, _, used in planned.values()), bool(moved)


def train_small(pool: Pool, small: Small, balancers: tuple[str, ...], extra: list[str]) -> Run:
    ranks = pool.run(small.ranks, _rank, dict(small.flags), balancers, extra)
    if EXPERTS in balancers:
        assert any(used for _, used, _ in ranks), "no replica was tried"
    if LAYERS in balancers:
        assert all(moved for *_, moved in ranks), "no layer moved"
    return join([run for run, *_ in ranks])


REPRESENTATIVES = ("mixtral_8x7b_alltoall_tp2pp4ep4_release",)


@pytest.mark.parametrize("name", sampled(runs(), *REPRESENTATIVES))
def test_balanced_equals_unbalanced(request, pool, corpus, tmp_path, name):
    small, balancers = runs()[name]
    te, spreads = small.needs_transformer_engine, SEQUENCES in balancers
    muon = small.flags.get("optimizer") == "muon"
    workers = request.getfixturevalue("engine" if te else "muon") if te or muon else pool
    plain = for_cpu(small, spreads=False)
    extra = MOCK_DATA
    if small.flags.get("overlap_param_gather_with_optimizer_step"):  # without balancers it demands another format
        extra = [*extra, "--ckpt-format", "torch"]
    if spreads:  # documents of all lengths, and weights that do not depend on the layout
        packed = [*corpus, "--dataloader-inter-document-masking"]
        train_small(
            workers, plain, (), [*packed, *f"--lr 0 --train-iters 1 --save {tmp_path} --save-interval 1".split()]
        )
        extra = [*packed, *f"--load {tmp_path} --finetune --no-load-optim --no-load-rng".split()]
    run = train_small(workers, for_cpu(small, spreads=spreads), balancers, extra)
    reference = train_small(workers, plain, (), extra)
    losses, parameters = differences(run, reference)
    of_losses, of_parameters = SINGLE_TOLERANCE if te or muon else (TOLERANCE, TOLERANCE)
    assert losses <= of_losses
    assert parameters <= of_parameters


# Refusals.


def _dry_runs(each: Sequence[Case]) -> dict[str, list[Verdict]]:
    recipes = [
        Recipe(f"{case.name} {case.small.ranks}GPU", dict(case.small.flags), dict(case.environment)) for case in each
    ]
    found = verdicts(recipes)
    return {name.rpartition(" ")[0]: answers for name, answers in found.items()}


def _reasons(verdict: Verdict) -> dict[str, str]:
    """Flag that a balancer refuses -> why. A refusal of another kind names the flag first, or behind "with"."""
    if verdict.why or not verdict.refusal:
        return dict(verdict.why)
    flag, why = re.fullmatch(r"(?:.* incompatible with )?(--\S+ \w+):? (.*)", verdict.refusal).groups()
    return {flag: why}


@pytest.mark.exhaustive
def test_the_list_is_what_is_refused(pool):
    """Of all configurations, with all of their flags, on ranks that are assumed to have GPUs."""
    (found,) = pool.run(1, _dry_runs, list(cases().values()), timeout=2 * PATIENCE)
    refused: dict[str, dict[str, str]] = {balancer: {} for balancer in BALANCERS}
    for name, (alone, *answers) in found.items():
        small = cases()[name].small
        assert bool(alone.refusal) == any(_has(small, flag) for flag in UPSTREAM), (name, alone.refusal)
        if alone.refusal:
            continue
        for balancer, verdict in zip(BALANCERS, answers, strict=True):
            refused[balancer] |= _reasons(verdict)
            assert (not verdict.idle) == (balancer in applicable(small)), (name, balancer)
            if not verdict.idle:
                assert (not verdict.refusal) == (balancer in accepted(small)), (name, balancer, verdict.refusal)
    assert refused == REFUSED


# Documentation.


def _names(flags: Mapping[str, str]) -> str:
    return ", ".join(f"`{flag}`" for flag in sorted(flags))


def _table() -> str:
    """How many configurations each balancer applies to, and what becomes of them, as docs/recipes.md says it."""
    lines = ["| | applies to | equal | refused | accepted, not run |", "|---|---|---|---|---|"]
    for balancer in BALANCERS:
        counts = dict.fromkeys(("applies", "equal", "refused", "not run"), 0)
        for case in cases().values():
            if balancer not in applicable(case.small):
                continue
            counts["applies"] += len(case.names)
            if balancer not in accepted(case.small):
                counts["refused"] += len(case.names)
            elif any(_has(case.small, flag) for flag in CANNOT_RUN):
                counts["not run"] += len(case.names)
            else:
                counts["equal"] += len(case.names)
        lines.append(f"| `{balancer}` | {' | '.join(map(str, counts.values()))} |")
    refused = [f"- `{balancer}` refuses {_names(REFUSED[balancer])}" for balancer in BALANCERS]
    not_run = [f"- not run: `{flag}`: {why}" for flag, why in sorted(CANNOT_RUN.items())]
    return "\n".join([*lines, "", *refused, *not_run]) + "\n"


def test_the_support_page_counts_them():
    """To write it anew: python -m tests.megatron.test_functional"""
    assert _table() in SUPPORT.read_text()


def test_shrinking_leaves_out_nothing_that_a_balancer_refuses():
    refused = [flag for flags in REFUSED.values() for flag in flags]
    for flag in [*refused, *CANNOT_RUN, *UPSTREAM]:
        assert any(_has(case.small, flag) for case in cases().values()), f"no configuration has {flag}"
    names = {word.partition(" ")[0].replace("-", "_") for flag in refused for word in flag[2:].split(" --")}
    assert not names & LEFT_OUT.keys()


if __name__ == "__main__":
    print(_table(), end="")

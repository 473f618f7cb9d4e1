"""Checkpoints of hybrid models do not depend on moves: they load under other segments, and in Megatron-LM without our
package, whose layers are Transformer Engine's, and back."""

from dataclasses import replace
from typing import Any

import pytest

from balancing.pipeline.pattern import read_pattern
from tests.support.moving import train_moving
from tests.support.plain import plain_rank, train_plainly
from tests.support.sampled import sampled
from tests.support.training import EXACT, MODEL, MOE, RankRun, Run, assert_same, differences, train

PP2 = "--pipeline-model-parallel-size 2"
EXACTLY = f"{' '.join(EXACT)} --init-method-std 0.1 {' '.join(MOE)}"
SINGLE = EXACTLY.replace("--fp64", "")
SHARDED = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
LATER = "--no-load-rng --ckpt-step 3"
PATTERN = "*-*E*-*E"
PLANS = {2: ((3,), (5,))}

ENGINE = "--transformer-impl transformer_engine --attention-backend unfused --moe-grouped-gemm"
LATENT = "--kv-lora-rank 12 --qk-head-dim 8 --qk-pos-emb-head-dim 4 --v-head-dim 6"
MAMBA = "--mamba-state-dim 8 --mamba-head-dim 8 --mamba-num-groups 2"
OTHERS = [(PATTERN, ""), ("+-+E", LATENT), ("M-M*ME", MAMBA)]


def _plain_rank(*given: Any) -> RankRun:
    """The body of one rank without our package, where Megatron-LM's Mamba layers find kernels for the CPU."""
    from megatron.balanced.local.mamba import kernels

    with kernels():
        return plain_rank(*given)


def _assert_goes_on(run: Run, whole: Run, of_losses: float, of_parameters: float) -> None:
    assert run.losses == pytest.approx(whole.losses[3:], rel=of_losses)
    assert differences(replace(run, losses=whole.losses), whole)[1] <= of_parameters


MODELS, STATES = [(PATTERN, ""), ("M-*EMM*E", MAMBA)], ["", SHARDED]


@pytest.mark.parametrize(
    "pattern, sizes, sharded",
    sampled([(*model, state) for model in MODELS for state in STATES], (PATTERN, "", SHARDED), (*MODELS[1], "")),
)
def test_goes_on_with_the_segments_of_the_move_or_others(pool, corpus, tmp_path, pattern, sizes, sharded):
    base = [*MODEL, *corpus, *f"{SINGLE if sharded else EXACTLY} {sharded} {sizes}".split()]
    flags = f"{PP2} --hybrid-layer-pattern {pattern} --save {tmp_path} --save-interval 3"
    whole, _ = train_moving(pool, 4 if sharded else 2, flags, PLANS, base=base)
    load = f"--load {tmp_path} {LATER}"
    moved = read_pattern(f"{pattern[:3]}|{pattern[3:]}")
    live = train(pool, 4 if sharded else 2, f"{PP2} --hybrid-layer-pattern {moved.text()} {load}", base=base,
                 parameters=True)  # fmt: skip
    if not sharded:  # a restart is the live run, bit for bit
        assert_same(replace(live, losses=whole.losses, grad_norms=whole.grad_norms), whole)
    _assert_goes_on(live, whole, 1e-6, 1e-5)
    segments = "|".join((pattern[:1], pattern[1:4], pattern[4:6], pattern[6:]))
    four = f"--pipeline-model-parallel-size 4 --hybrid-layer-pattern {segments} {load}"
    other = train(pool, 4, four, base=base, parameters=True)
    _assert_goes_on(other, whole, 1e-6 if sharded else 1e-12, 1e-5 if sharded else 1e-12)


def test_the_pattern_in_a_checkpoint_is_that_of_the_move(pool, corpus, tmp_path):
    base = [*MODEL, *corpus, *EXACTLY.split()]
    flags = f"{PP2} --hybrid-layer-pattern {PATTERN} --save {tmp_path} --save-interval 3"
    whole, _ = train_moving(pool, 2, flags, PLANS, base=base)
    found = pool.run(2, _patterns, [*base, *f"{PP2} --use-checkpoint-args --load {tmp_path} {LATER}".split()])
    assert found == ["*-*|E*-*E"] * 2
    assert whole.losses


def _patterns(argv: list[str]) -> str:
    from megatron.balanced.trainer.arguments import parse_arguments

    return parse_arguments(argv)[0].hybrid_layer_pattern


@pytest.mark.parametrize("pattern, latent", sampled(OTHERS, OTHERS[2]))
def test_goes_on_without_our_package_and_back(engine, corpus, tmp_path, pattern, latent):
    base = [*MODEL, *corpus, *f"{SINGLE} {latent} {ENGINE}".split()]
    half = len(pattern) // 2
    flags = f"{PP2} --hybrid-layer-pattern {pattern} --save {tmp_path} --save-interval 2"
    whole, _ = train_moving(engine, 2, flags, {1: ((half - 1,), (half + 1,))}, base=base)
    segments = f"{pattern[: half + 1]}|{pattern[half + 1 :]}"
    load = f"--load {tmp_path} --ckpt-step 2 --no-load-rng"
    theirs = f"{PP2} --hybrid-layer-pattern {segments} {load} --save {tmp_path / 'back'} --save-interval 3"
    run = train_plainly(engine, 2, [*base, *theirs.split()], tmp_path, body=_plain_rank)
    assert run.losses == pytest.approx(whole.losses[2:], rel=1e-6)
    assert differences(replace(run, losses=whole.losses), whole)[1] <= 1e-5
    load = f"--load {tmp_path / 'back'} --ckpt-step 3 --no-load-rng"
    back = train(engine, 1, f"--hybrid-layer-pattern {pattern} {load}", base=base, parameters=True)
    _assert_goes_on(back, whole, 1e-6, 1e-5)


@pytest.mark.parametrize("pattern, latent", OTHERS)
def test_weights_of_our_modules_are_those_of_transformer_engines(pool, engine, corpus, tmp_path, pattern, latent):
    """Under the same names. Optimizers differ: PyTorch's Adam counts steps by parameter, Transformer Engine's does
    not. Extra state, which our modules have none of, is for 8-bit numbers alone."""
    base = [*MODEL, *corpus, *f"{SINGLE} {latent}".split()]
    flags = f"--hybrid-layer-pattern {pattern} --save {tmp_path} --save-interval 3"
    whole = train(pool, 1, flags, base=base)
    load = f"--load {tmp_path} {LATER} --no-load-optim --dist-ckpt-strictness log_unexpected"
    theirs = [*base, *f"{ENGINE} --hybrid-layer-pattern {pattern} {load}".split()]
    assert train_plainly(engine, 1, theirs, tmp_path, body=_plain_rank).losses == pytest.approx(
        whole.losses[3:], rel=1e-6
    )

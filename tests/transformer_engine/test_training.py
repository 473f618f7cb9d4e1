"""Layers and optimizer of Transformer Engine train as Megatron-LM's own do, in every layout."""

import contextlib
import io
from functools import wraps
from typing import Any

import pytest

from tests.experts.test_fusion import _train_fused
from tests.support.program import parse
from tests.support.sampled import sampled
from tests.support.settings import scheme_flags
from tests.support.training import MOCK_DATA, MODEL, RankRun, Run, join, train
from tests.support.transformer_engine.model import BASE, EXPERTS, LOCAL, TE, assert_close

PP2 = "--pipeline-model-parallel-size 2"
OVERLAPS = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 2000"
PACKED = "--dataloader-inter-document-masking"

# model, flags
MODELS = {
    "dense": ("", ""),
    "gated, grouped queries": (
        "--swiglu --normalization RMSNorm --group-query-attention --num-query-groups 2 "
        "--untie-embeddings-and-output-weights",
        "",
    ),
    "packed documents": ("", PACKED),
    "experts": (EXPERTS, ""),
    "recompute": ("", "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"),
    "clipped": ("", "--clip-grad 0.5"),
    "frozen layers": ("", "--untie-embeddings-and-output-weights --freeze-layers 2 --freeze-layers-start 2"),
    "early exit": (
        "",
        scheme_flags(
            early_exit_layers=[1, 2, 3],
            early_exit_threshold=0.9,
            early_exit_start=1,
            early_exit_loss_weight=0.5,
        ),
    ),
    "mixture of depths": ("", scheme_flags(mixture_of_depths=0.25)),
}
# Their modules are named otherwise upstream, and so is what is in checkpoints.
RENAMED = {"pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"}

# model, ranks, flags
LAYOUTS = {
    "PP 2": ("", 2, PP2),
    "TP 2, sequence parallel": ("", 2, "--tensor-model-parallel-size 2 --sequence-parallel"),
    "DP 2, both overlaps": ("", 2, OVERLAPS),
    "EP 2, grouped experts": (EXPERTS, 2, "--expert-model-parallel-size 2 --moe-grouped-gemm"),
    "EP 2, grouped experts, DP 2, both overlaps": (
        EXPERTS,
        4,
        f"--expert-model-parallel-size 2 --moe-grouped-gemm {OVERLAPS}",
    ),
}


def _as_local(run: Run) -> Run:
    """`run` with the names that Megatron-LM's own layers have in checkpoints."""
    named = {}
    for name, whole in run.parameters.items():
        for theirs, own in RENAMED.items():
            name = name.replace(theirs, own)
        named[name] = whole
    return Run(run.losses, run.grad_norms, run.validation, named)


@pytest.mark.parametrize(
    "case", sampled(MODELS, "gated, grouped queries", "packed documents", "experts", "frozen layers", "early exit")
)
def test_trains_as_the_local_implementation(pool, engine, corpus, case):
    model, flags = MODELS[case]
    base = [*MODEL, *corpus, *BASE.split(), *model.split(), *flags.split()]
    local = train(pool, 1, LOCAL, base=base, parameters=True)
    run = train(engine, 1, TE, base=base, parameters=True)
    assert_close(_as_local(run) if model == EXPERTS else run, local)


@pytest.mark.parametrize(
    "case", sampled(LAYOUTS, "TP 2, sequence parallel", "EP 2, grouped experts, DP 2, both overlaps")
)
def test_layouts_of_transformer_engine_agree(model_of, case):
    model, ranks, flags = LAYOUTS[case]
    model = model_of(model)
    assert_close(model.train(ranks, flags), model.alone())


def _train_te_fused(argv: list[str]) -> tuple[RankRun, set[str], int]:
    """Train with fused accumulation. Returns the run, which of Transformer Engine's layers fuse, and how many weights
    of the last step were told that their gradient is where it belongs."""
    from megatron.training import training

    fused, weights = set(), []
    build = training.setup_model_and_optimizer

    @wraps(build)
    def setup_model_and_optimizer(*args: Any, **kwargs: Any) -> Any:
        built = build(*args, **kwargs)
        for name, module in built[0][0].named_modules():
            if getattr(module, "fuse_wgrad_accumulation", False):
                fused.add(name.rpartition(".")[2])
                weights.extend(part for own, part in module.named_parameters() if part.dim() == 2)
        return built

    training.setup_model_and_optimizer = setup_model_and_optimizer
    run, _, _ = _train_fused(argv)
    return run, fused, sum(weight.grad_added_to_main_grad for weight in weights)


def test_gradients_accumulate_fused(model_of):
    """Products add to the gradient buffer themselves, as they do on a GPU."""
    model = model_of(EXPERTS)
    flags = "--moe-grouped-gemm --micro-batch-size 2"
    ((run, fused, added),) = model.pool.run(1, _train_te_fused, model.argv(flags))
    assert fused == {"linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"}
    assert added == 4 * (2 + 2 * 4)  # layers; attention's, and those of four experts
    assert_close(join([run]), model.train(1, flags))


def _error(argv: list[str]) -> str:
    """The one line with which this rank stops."""
    said = io.StringIO()
    with pytest.raises(SystemExit) as stopped, contextlib.redirect_stderr(said):
        args, config, start = parse(argv)
        start(args, config)
    assert stopped.value.code == 2
    return said.getvalue()


def test_float64_is_refused(engine):
    (line,) = engine.run(1, _error, [*MODEL, *MOCK_DATA, *f"--fp64 {TE}".split()])
    assert line.count("\n") == 1 and "--fp64 is incompatible with --transformer-impl transformer_engine" in line


def test_nobody_computes_weight_gradients_that_are_delayed(engine):
    """Megatron-LM computes them with --overlap-moe-expert-parallel-comm alone."""
    (said,) = engine.run(1, _error, [*MODEL, *MOCK_DATA, *f"--delay-wgrad-compute {TE}".split()])
    (line,) = [line for line in said.splitlines() if "error" in line]
    assert "overlap_moe_expert_parallel_comm must be enabled when enabling delay_wgrad_compute" in line

"""What balancers use of Transformer Engine beyond its interface is looked for at start-up."""

import pytest

FLAGS = {
    "replicas of grouped experts": (
        "--num-experts 4 --moe-grouped-gemm --expert-model-parallel-size 2 --balance-experts",
        "module.grouped_linear:GroupedLinear.__init__ num_gemms",
    ),
    "layers that move": (
        "--fp8-format hybrid --fp8-recipe delayed --pipeline-model-parallel-size 2 --balance-layers",
        "quantization:FP8GlobalStateManager.quantization_state global_scale_buffer",
    ),
    "weights in 8 bits": (
        "--fp8-format hybrid --fp8-param-gather --pipeline-model-parallel-size 2 --balance-layers",
        "tensor.mxfp8_tensor:MXFP8Tensor.get_metadata columnwise_data",
    ),
}


def _check(flags: str, without: str | None) -> str:
    """The message for a run with `flags`, where Transformer Engine lacks a name."""
    import argparse
    import dataclasses

    from megatron.balanced.trainer.checks import engine_parts
    from megatron.balanced.trainer.config import BalanceConfig

    config = BalanceConfig()
    for name in ("experts", "layers"):
        section = dataclasses.replace(getattr(config, name), enabled=f"--balance-{name}" in flags)
        config = dataclasses.replace(config, **{name: section})
    args = argparse.Namespace(
        transformer_impl="transformer_engine",
        moe_grouped_gemm="--moe-grouped-gemm" in flags,
        fp8="hybrid" if "--fp8-format" in flags else None,
        fp8_recipe="delayed",
        fp8_param_gather="--fp8-param-gather" in flags,
    )
    if without is not None:
        target, _, name = without.partition(" ")
        engine_parts.PARTS = tuple(
            dataclasses.replace(part, names=(*part.names, f"{name}_of_another_version"))
            if part.target == target
            else part
            for part in engine_parts.PARTS
        )
    try:
        engine_parts.check_engine(args, config)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("who", FLAGS)
def test_the_version_of_the_tests_has_all(engine, who):
    assert engine.run(1, _check, FLAGS[who][0], None) == [""]


@pytest.mark.parametrize("who", FLAGS)
def test_a_version_without_a_name_is_refused(engine, who):
    flags, name = FLAGS[who]
    (said,) = engine.run(1, _check, flags, name)
    assert f"lacks {name}_of_another_version, which {who} need; install 2.20.2" in said and "\n" not in said

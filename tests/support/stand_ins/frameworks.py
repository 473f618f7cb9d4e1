"""Megatron-Bridge and, where it is installed, verl: their own Python from PyPI on the CPU device.

What they import and a CPU does not need is empty (`absent.py`). Transformer Engine, whose layers Bridge subclasses,
is its own Python over a module of torch.
"""

import importlib
import os
import warnings

from tests.support import transformer_engine
from tests.support.packages_apart import add_to_path, why_missing
from tests.support.stand_ins.absent import stand_in_for

__all__ = ["install", "install_bridge"]

ABSENT = (
    "datasets", "flash_attn", "mbridge", "megatron.energon", "modelopt", "nvidia_resiliency_ext", "pandas", "ray",
    "wandb", "megatron.bridge.recipes.flux", "megatron.bridge.recipes.wan",  # of diffusion
)  # fmt: skip


def install() -> None:
    """To be called after `use_cpu` and before megatron.core is imported."""
    install_bridge()
    if why_missing("verl", "verl") is None:
        add_to_path("verl")
        # As its entry point has verl do: the tests' Python may have been installed before there was one.
        os.environ |= {"VERL_USE_EXTERNAL_MODULES": "examples.verl_engine,megatron.balanced.loops.verl_plugin"}
        os.environ |= {"VERL_ENGINE_VENDOR": "balanced", "VERL_USE_EXTERNAL_PLUGINS": "none"}
        importlib.import_module("verl.workers.engine.megatron.transformer_impl")
        del os.environ["VERL_ENGINE_VENDOR"]


def install_bridge() -> None:
    """As `install`, without verl."""
    transformer_engine.install()
    add_to_path("megatron_bridge")
    stand_in_for(*ABSENT)
    # It adjusts the shapes of messages for distillation, which an empty class would do to all.
    distillation = importlib.import_module("modelopt.torch.distill.plugins.megatron")
    distillation.get_tensor_shapes_adjust_fn_for_distillation = lambda *args, **kwargs: None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        importlib.import_module("megatron.bridge.training.pretrain")
        importlib.import_module("megatron.bridge.training.gpt_step")
    initialize = importlib.import_module("megatron.bridge.training.initialize")
    initialize.compile_helpers = lambda: None  # the wheel has the compiled helper and no Makefile

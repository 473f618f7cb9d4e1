"""A dynamic model, described to the trainer: its flags, its modules in the layer spec, and its callbacks.

Megatron-LM's modules are imported inside functions, since flags are added before the device is chosen.
"""

import argparse
from collections.abc import Mapping
from typing import TYPE_CHECKING

from examples.dynamic_models.checks import check_dynamics
from examples.dynamic_models.config import add_flags, config_of
from megatron.balanced.trainer.model_extension import ModelExtension

if TYPE_CHECKING:
    from megatron.balanced.shared.callbacks import StepCallback

__all__ = ["DynamicModel"]


class DynamicModel(ModelExtension):
    """A GPT with the schemes that flags switch on (`examples.dynamic_models.config`); a plain GPT without any."""

    def add_flags(self, parser: argparse.ArgumentParser) -> None:
        add_flags(parser)

    def check(self, args: argparse.Namespace) -> None:
        check_dynamics(args, config_of(args))

    def modules(self, args: argparse.Namespace) -> Mapping[type, type]:
        from megatron.core.transformer.dot_product_attention import DotProductAttention
        from megatron.core.transformer.transformer_layer import TransformerLayer

        from examples.dynamic_models.layer import dynamic_layer
        from examples.dynamic_models.sparse_attention import sparse_attention

        config = config_of(args)
        modules: dict[type, type] = {}
        if config.enabled:
            modules[TransformerLayer] = dynamic_layer(config)
        if config.sparse_attention != "none":
            modules[DotProductAttention] = sparse_attention(config)
        return modules

    def layers_differ(self, args: argparse.Namespace) -> bool:
        return bool(config_of(args).mixture_of_depths)  # some layers have a router

    def callbacks(self, args: argparse.Namespace) -> "list[StepCallback]":
        from examples.dynamic_models.callbacks import dynamics_callbacks

        config = config_of(args)
        return dynamics_callbacks(args, config) if config.enabled else []

    def frozen_layers(self, args: argparse.Namespace) -> int | None:
        config = config_of(args)
        return None if config.changes_otherwise else config.freeze_layers

"""What the layer balancer needs of Megatron-LM's trainer: how it builds layers and keeps layouts, and its loop."""

import argparse
import inspect
from functools import partial
from typing import Any

from megatron.core.optimizer import OptimizerConfig, get_mup_config_overrides
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.training import training
from megatron.training.models.base import ModelConfig
from megatron.training.models.gpt import GPTModelConfig, default_layer_spec
from megatron.training.models.hybrid import HybridModelConfig

from megatron.balanced.layers.loop import TrainingLoop
from megatron.balanced.layers.source import LayerSource
from megatron.balanced.shared import callbacks
from megatron.balanced.trainer.checks.fill import deferred_share
from megatron.balanced.trainer.release import Departure

__all__ = ["layer_source", "training_loop"]


def layer_source(args: argparse.Namespace, model: ModelConfig) -> LayerSource:
    """The layers of the model that is built from `model`. New layouts are written to `model` and to `args`, which
    checkpoints record."""
    hybrid = isinstance(model, HybridModelConfig)

    def keep(layout: str) -> None:
        if hybrid:
            args.hybrid_layer_pattern = model.hybrid_layer_pattern = layout
        else:
            args.pipeline_model_parallel_layout = layout

    return LayerSource(
        model.transformer,
        partial(_layer_spec, model),
        pattern=model.hybrid_layer_pattern if hybrid else None,
        build=model.get_builder_cls()(model).build_model,
        on_layout=keep,
    )


def _layer_spec(config: GPTModelConfig, vp_stage: int | None) -> Any:
    """The spec of the layers of a chunk in the present layout, as Megatron-LM's builder determines it."""
    spec = config.transformer_layer_spec
    if spec is None:
        spec = default_layer_spec(config, vp_stage)
    elif not isinstance(spec, ModuleSpec) and callable(spec):
        takes_stage = "vp_stage" in inspect.signature(spec).parameters
        spec = spec(config, vp_stage=vp_stage) if takes_stage else spec(config)
    if config.attention_backend == AttnBackend.local and hasattr(spec, "submodules"):
        spec.submodules.self_attention.submodules.core_attention = DotProductAttention
    return spec


def training_loop(args: argparse.Namespace, model: ModelConfig, *, fills: bool) -> TrainingLoop:
    """What layer balancing needs of Megatron-LM's loop. fills: whether --fill-with-weight-gradients is on."""

    def overrides(config: OptimizerConfig) -> Any:
        _, given = training.get_megatron_optimizer_config(args)
        if not args.use_mup:
            return given
        return {**(given or {}), **get_mup_config_overrides(config, model.transformer.mup_width_mult, args.optimizer)}

    return TrainingLoop(
        iterations=args.train_iters,
        log_interval=args.log_interval,
        timeout_minutes=args.distributed_timeout_minutes,
        gloo_groups=args.use_gloo_process_groups,
        optimizer_overrides=overrides,
        trained=callbacks.trained,
        callbacks=lambda: callbacks.registered,
        renew_schedule=lambda: callbacks.use_schedule(training.get_forward_backward_func(schedule_pg_collection=None)),
        depart=partial(Departure, args),
        weight_share=deferred_share(args) if fills else 0.0,
    )

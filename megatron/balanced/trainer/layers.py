"""Layers that move in Megatron-LM's trainer: how it builds layers, keeps layouts, and lets ranks leave. Their flags are
checked in `checks.layers`."""

import argparse
import inspect
from functools import partial
from typing import Any

from megatron.core.optimizer import get_mup_config_overrides
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.training import training
from megatron.training.models.base import ModelConfig
from megatron.training.models.gpt import GPTModelConfig, default_layer_spec
from megatron.training.models.hybrid import HybridModelConfig

from megatron.balanced.layers.balancer import LayerBalancer
from megatron.balanced.layers.move_groups import MoveGroups
from megatron.balanced.layers.recapture import RecapturedGraphs
from megatron.balanced.layers.shrink import Shrinking
from megatron.balanced.layers.training_loop import TrainingLoop
from megatron.balanced.observe.observer import Observer
from megatron.balanced.run import Run
from megatron.balanced.shared.callbacks import StepCallback
from megatron.balanced.trainer.checks.fill import deferred_share
from megatron.balanced.trainer.config import BalanceConfig
from megatron.balanced.trainer.release import Departure, TensorBoardOfTheLast

__all__ = ["layers", "reads_data_everywhere"]


def reads_data_everywhere(config: BalanceConfig) -> bool:
    """Whether every stage reads data, since any may become the last one when ranks leave."""
    return config.layers.enabled and config.layers.repacks


def layers(
    run: Run, args: argparse.Namespace, config: BalanceConfig, model: ModelConfig, observer: Observer
) -> list[StepCallback]:
    """Let the run move layers of the model that is built from `model`, once it has the optimizer. Returns the callbacks
    that follow moves; their steps begin after those of the balancers.

    The ranks are connected before the model is wrapped and others measure the free memory. New layouts are written to
    `model` and to `args`, which checkpoints record.
    """
    groups = MoveGroups(args.distributed_timeout_minutes)

    def connect(chunks: list[Any]) -> list[Any]:
        groups.connect()
        return chunks

    def keep(layout: str) -> None:
        if isinstance(model, HybridModelConfig):
            args.hybrid_layer_pattern = model.hybrid_layer_pattern = layout
        else:
            args.pipeline_model_parallel_layout = layout

    def renew_schedule(run: Run) -> None:
        run.use_schedule(training.get_forward_backward_func(schedule_pg_collection=None))

    def build(run: Run) -> LayerBalancer:
        loop = TrainingLoop(
            observer=observer,
            groups=groups,
            shrinking=Shrinking(
                build=model.get_builder_cls()(model).build_model,
                depart=partial(Departure, args, run),
                renew_schedule=partial(renew_schedule, run),
            ),
            log_interval=args.log_interval,
            weight_share=deferred_share(args) if config.fill_with_weight_gradients else 0.0,
        )
        return LayerBalancer(
            run.chunks,
            run.optimizer,
            run.scheduler,
            config.layers,
            layer_spec=partial(_layer_spec, model),
            job=run.job,
            overrides=_overrides(args, model, run.optimizer.config),
            steps=args.train_iters,
            gloo_groups=args.use_gloo_process_groups,
            on_layout=keep,
            report=observer.note,
            loop=loop,
        )

    model.pre_wrap_hooks.append(connect)
    run.build_last = build
    return [TensorBoardOfTheLast(args), *[RecapturedGraphs()] * (args.cuda_graph_impl == "transformer_engine")]


def _overrides(args: argparse.Namespace, model: ModelConfig, config: Any) -> Any:
    """The `config_overrides` that Megatron-LM passed to the optimizer with `config`."""
    _, overrides = training.get_megatron_optimizer_config(args)
    if not args.use_mup:
        return overrides
    return {**(overrides or {}), **get_mup_config_overrides(config, model.transformer.mup_width_mult, args.optimizer)}


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

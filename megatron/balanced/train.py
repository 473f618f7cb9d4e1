"""Training, from checked flags to the last checkpoint: everything ours is put in place, then Megatron takes over."""

import argparse
from collections.abc import Callable
from functools import partial

from megatron.core.enums import ModelType
from megatron.training import pretrain
from megatron.training.argument_utils import pretrain_cfg_container_from_args
from megatron.training.models.gpt import GPTModelConfig
from megatron.training.utils import print_rank_0

from megatron.balanced import patches, step
from megatron.balanced.arguments import BalanceConfig, machine_of, stop
from megatron.balanced.data import forward_step, train_valid_test_datasets
from megatron.balanced.dynamics import add_dynamics
from megatron.balanced.experts import DoesNotFit, ExpertBalancer
from megatron.balanced.failure import named_failures
from megatron.balanced.model import model_config
from megatron.balanced.observe import Observer

__all__ = ["train"]


def train(args: argparse.Namespace, config: BalanceConfig) -> None:
    """Train as the flags say. `parse_arguments` made both arguments."""
    if config.balance_dry_run:
        print_rank_0("\n".join(patches.rows(args, config)))
        return
    for line in patches.install(args, config):
        print_rank_0(f"> {line}")
    try:
        model = model_config(args, config.experts, config.dynamics)
    except (ValueError, AssertionError) as error:  # what Megatron finds wrong with the model, the same on all ranks
        stop(error)
    forward = forward_step
    observer = None
    if config.balance_report is not None:
        observer = Observer(args, config)
        model.post_wrap_hooks.append(observer.attach)
        step.callbacks.append(observer)
        forward = partial(forward_step, on_documents=observer.documents)
    note = observer.note if observer is not None else lambda event: None
    if config.dynamics.any:
        add_dynamics(args, config.dynamics, model, note)
    if config.experts.balance_experts:
        machine = machine_of(config, args.world_size)
        balancer = ExpertBalancer(args, config.experts, machine, note)
        model.post_wrap_hooks.append(balancer.attach)
        step.callbacks.append(balancer)
    try:
        with named_failures(args.rank, args.world_size):
            _pretrain(args, model, forward, observer)
    finally:
        step.callbacks.clear()
        patches.uninstall()


def _pretrain(args: argparse.Namespace, model: GPTModelConfig, forward: Callable, observer: Observer | None) -> None:
    container = pretrain_cfg_container_from_args(args, model)
    try:
        pretrain(container, train_valid_test_datasets, ModelType.encoder_or_decoder, forward)
    except DoesNotFit as error:
        stop(error)
    except SystemExit:  # how Megatron ends early, on all ranks together: at --exit-interval, on a signal, ...
        if observer is not None:
            observer.close()
        raise
    if observer is not None:
        observer.close()

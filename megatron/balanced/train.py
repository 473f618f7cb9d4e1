"""Training, from checked flags to the last checkpoint: everything ours is put in place, then Megatron takes over."""

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from megatron.core.enums import ModelType
from megatron.training import pretrain
from megatron.training.argument_utils import pretrain_cfg_container_from_args
from megatron.training.models.gpt import GPTModelConfig
from megatron.training.utils import print_rank_0

from megatron.balanced import callbacks, patches
from megatron.balanced.arguments import BalanceConfig, machine_of
from megatron.balanced.data import forward_step, train_valid_test_datasets
from megatron.balanced.dynamics.schemes import add_dynamics
from megatron.balanced.experts.balancer import ExpertBalancer, ReplicaMemoryError
from megatron.balanced.layers.balancer import LayerBalancer
from megatron.balanced.layers.dropout import DropoutStreams
from megatron.balanced.layers.release import Released, hand_over_tensorboard
from megatron.balanced.model import model_config
from megatron.balanced.observer import Observer
from megatron.balanced.sequences.balancer import SequenceBalancer
from megatron.balanced.watchdog.heartbeat import stop
from megatron.balanced.watchdog.stall import stalls_told

__all__ = ["train"]


def train(args: argparse.Namespace, config: BalanceConfig) -> None:
    """Train as the flags say. `parse_arguments` made both arguments."""
    if config.balance_dry_run:
        print_rank_0("\n".join(patches.rows(args, config)))
        return
    for line in patches.install(args, config):
        print_rank_0(f"> {line}")
    try:
        model = model_config(args, config.experts, config.sequences, config.dynamics)
    except (ValueError, AssertionError) as error:  # what Megatron finds wrong with the model, the same on all ranks
        stop(error)
    forward: Callable = forward_step
    datasets: Callable = train_valid_test_datasets
    observer = None
    if config.balance_report is not None or config.layers.on:
        observer = Observer(args, config)
        model.post_wrap_hooks.append(observer.attach)
        callbacks.callbacks.append(observer)
        forward = partial(forward_step, on_documents=observer.documents)
    machine = machine_of(config, args.world_size)
    renew: list[Callable[[], None]] = []  # when layers have moved
    report = observer.note if observer is not None else lambda event: None
    if config.dynamics.any:
        renew += add_dynamics(args, config.dynamics, model, report)
    if config.sequences.balance_sequences:
        sequences = SequenceBalancer(args, config.sequences, machine, report)
        model.pre_wrap_hooks.append(sequences.attach)
        callbacks.callbacks.append(sequences)
        forward = partial(forward, sequences=sequences)
        datasets = sequences.datasets(datasets)
    if config.experts.balance_experts:
        balancer = ExpertBalancer(args, config.experts, machine, observer.note if observer is not None else None)
        model.post_wrap_hooks.append(balancer.attach)
        callbacks.callbacks.append(balancer)
        renew.append(balancer.renew)
    if config.layers.on:
        assert observer is not None
        layers = LayerBalancer(args, config.layers, model, observer.note)
        observer.listeners.append(layers.measured)
        layers.settled = partial(observer.listeners.remove, layers.measured)
        layers.mover.built.append(observer.watch_layer)
        layers.mover.moved += renew
        layers.mover.leaving.append(observer.close)
        layers.mover.stayed += [observer.stayed, lambda headed: hand_over_tensorboard(args)]
        model.post_wrap_hooks.append(layers.attach)
        callbacks.callbacks.append(layers)
        if args.attention_dropout or args.hidden_dropout:
            streams = DropoutStreams(args)
            layers.mover.built.append(streams.watch_layer)
            model.post_wrap_hooks.append(streams.attach)
            callbacks.callbacks.append(streams)
    try:
        folder = None if config.balance_report is None else Path(config.balance_report)
        with stalls_told(args, folder):
            _pretrain(args, model, datasets, forward, observer)
    finally:
        callbacks.callbacks.clear()
        callbacks.use_schedule(None)
        patches.uninstall()


def _pretrain(
    args: argparse.Namespace, model: GPTModelConfig, datasets: Callable, forward: Callable, observer: Observer | None
) -> None:
    container = pretrain_cfg_container_from_args(args, model)
    try:
        pretrain(container, datasets, ModelType.encoder_or_decoder, forward)
    except ReplicaMemoryError as error:
        stop(error)
    except Released:
        sys.stdout.flush()
        raise
    except SystemExit:  # how Megatron ends early, on all ranks together: at --exit-interval, on a signal, ...
        if observer is not None:
            observer.close()
        raise
    if observer is not None:
        observer.close()

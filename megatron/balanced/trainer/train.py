"""Training with checked flags: build the callbacks of all features, install the patches, call Megatron-LM."""

import argparse
import contextlib
import datetime
from collections.abc import Callable, Iterator, Sequence
from functools import partial, wraps
from typing import Any

from megatron.core.enums import ModelType
from megatron.training import pretrain
from megatron.training.argument_utils import pretrain_cfg_container_from_args
from megatron.training.global_vars import get_tensorboard_writer, get_wandb_writer
from megatron.training.models.base import ModelConfig
from megatron.training.utils import print_rank_0

from balancing.kernels.choice import KernelError
from balancing.pipeline.pattern import read_pattern
from balancing.run_lock import one_run
from balancing.settings import SettingError
from megatron.balanced.experts.balancer import ReplicaMemoryError
from megatron.balanced.fill.schedule import WeightGradientFill
from megatron.balanced.observe.captured import CapturedObserver, IterationObserver
from megatron.balanced.observe.empty_steps import EmptySteps
from megatron.balanced.observe.observer import Observer
from megatron.balanced.observe.own_rates import OwnRates
from megatron.balanced.observe.report_writer import ReportWriter
from megatron.balanced.run import Run, Trained
from megatron.balanced.shared.callbacks import StepCallback
from megatron.balanced.shared.captured_schedule import captures_iterations
from megatron.balanced.shared.job import Job
from megatron.balanced.shared.process_groups import SocketLimitError
from megatron.balanced.trainer import patches
from megatron.balanced.trainer.agreement import check_record
from megatron.balanced.trainer.checks.checkpoints import arguments_of_checkpoint, nothing_to_load
from megatron.balanced.trainer.config import AUTO, BalanceConfig, cluster_from_flags, rates_line
from megatron.balanced.trainer.data import forward_step, is_packed, train_valid_test_datasets
from megatron.balanced.trainer.dry_run import assumes_gpus, plan_lines
from megatron.balanced.trainer.experts import experts
from megatron.balanced.trainer.kernels import kernels_line
from megatron.balanced.trainer.layers import layers, reads_data_everywhere
from megatron.balanced.trainer.model import model_config
from megatron.balanced.trainer.model_extension import ModelExtension
from megatron.balanced.trainer.prediction import get_embedding_ranks
from megatron.balanced.trainer.rendezvous import store_of_process_groups
from megatron.balanced.trainer.sequences import sequences
from megatron.balanced.trainer.trials import trials
from megatron.balanced.trainer.watchdog.failure import stop

__all__ = ["train"]


def train(
    args: argparse.Namespace,
    config: BalanceConfig,
    callbacks: Sequence[StepCallback] = (),
    extension: ModelExtension | None = None,
) -> None:
    """Train as the flags say, until the last checkpoint.

    args: Megatron-LM's arguments; `parse_arguments` makes them and `config`.
    config: this package's flags.
    callbacks: the caller's own. Their steps begin after those of all features, and end before them.
    extension: the extension of the model, the same as in `parse_arguments`.
    """
    extension = extension or ModelExtension()
    run = Run(extension.callbacks(args), callbacks)  # train_step is patched if there are any
    try:
        if config.balance_dry_run:
            lines = patches.rows(args, config, run)
            patches.install(args, config, run)
            if not assumes_gpus():  # `parse_arguments` has asked for that model, whose vocabulary is not known
                _model(args, config, extension)
            print_rank_0("\n".join([*lines, *plan_lines(args, config, extension.frozen_layers(args))]))
            return
        for line in patches.install(args, config, run):
            print_rank_0(f"> {line}")
        print_rank_0(f"> {kernels_line(args)}")
        model = _model(args, config, extension)
        with _only_run(args, config):
            datasets, forward = _add_features(run, args, config, model)
            model.post_wrap_hooks.append(run.attach)
            _pretrain(run, args, model, datasets, forward)
    finally:
        patches.uninstall()


@contextlib.contextmanager
def _only_run(args: argparse.Namespace, config: BalanceConfig) -> Iterator[None]:
    """Hold the locks of the folders that the job writes, on rank 0."""
    with contextlib.ExitStack() as locks:
        if args.rank == 0:
            try:
                for flag, folder in (("--balance-report", config.balance_report), ("--save", args.save)):
                    if folder and "://" not in folder:
                        locks.enter_context(one_run(flag, folder))
            except ValueError as error:
                stop(error)
        yield


def _model(args: argparse.Namespace, config: BalanceConfig, extension: ModelExtension) -> ModelConfig:
    try:
        fills = config.fill_with_weight_gradients
        model = model_config(args, config.experts, config.sequences, extension.modules(args), fills=fills)
        if extension.layers_differ(args):
            model.transformer.hetereogenous_dist_checkpoint = True
        return model
    except (ValueError, AssertionError) as error:  # Megatron-LM rejects the model, on all ranks alike
        stop(error)


def _add_features(
    run: Run, args: argparse.Namespace, config: BalanceConfig, model: ModelConfig
) -> tuple[Callable, Callable]:
    """Add the callbacks of all features that are on. Returns the provider of datasets and the forward step."""
    run.job = Job(args.seq_length, args.micro_batch_size, args.distributed_timeout_minutes, recaptures=True)
    run.cluster = cluster_from_flags(config, args.world_size)
    if config.experts.enabled or config.sequences.enabled:
        print_rank_0(f"> {rates_line(config, run.cluster)}")
    observer = _observer(run, args, config) if config.balance_report is not None or config.layers.enabled else None
    if observer is not None and config.balance_report is not None:
        run.report = observer.note
        for callback in run.callbacks:
            callback.report = observer.note
    resumed = None
    if config.balances:
        resumed = arguments_of_checkpoint(args)
        try:
            check_record(resumed)
        except ValueError as error:
            stop(error)
    run.trained = lambda: Trained(args.iteration, args.consumed_train_samples)
    run.first[:0] = [*([] if observer is None else [observer]), *trials(run, args, config, resumed)]

    tokens, rest = None, list[StepCallback]()
    if config.sequences.enabled:
        tokens = sequences(run, args, config.sequences, model, resumed)
    if config.experts.enabled:
        experts(run, args, config, resumed)
    if config.layers.enabled:
        assert observer is not None
        rest += layers(run, args, config, model, observer)
    if config.fill_with_weight_gradients:
        timed = None if observer is None else observer.weight_gradients
        rest.append(WeightGradientFill(args.distributed_timeout_minutes, timed))

    everywhere = reads_data_everywhere(config)
    forward = partial(forward_step, observer=observer, tokens=tokens, everywhere=everywhere)
    if run.callbacks or run.build or rest or patches.masks_losses(args):
        rest.append(empty := EmptySteps(run.report))
        forward = partial(forward, count=empty.count)
    run.last[:0] = rest
    datasets = partial(train_valid_test_datasets, everywhere=everywhere)
    datasets.is_distributed = True  # type: ignore[attr-defined]  # for Megatron: every rank calls it
    if (note := nothing_to_load(args)) is not None and args.rank == 0:
        forward = _say_first(note, forward)  # type: ignore[assignment]
    return datasets if tokens is None else tokens.datasets(datasets), forward


def _observer(run: Run, args: argparse.Namespace, config: BalanceConfig) -> Observer:
    """Raises ValueError if the report's directory cannot be written to."""
    writer = None
    if config.balance_report is not None:
        writer = ReportWriter(
            config.balance_report,
            is_last=args.rank == args.world_size - 1,
            timeout=datetime.timedelta(minutes=args.distributed_timeout_minutes),
            kinds=() if args.hybrid_layer_pattern is None else read_pattern(args.hybrid_layer_pattern).kinds,
            writers=lambda: (get_tensorboard_writer(), get_wandb_writer()),
        )
    own_rates = None
    if config.cluster == AUTO and config.experts.enabled:
        own_rates = OwnRates(run.cluster, run.use_cluster)
    observer = Observer
    if args.cuda_graph_impl != "none":
        observer = IterationObserver if captures_iterations(args) else CapturedObserver
    return observer(
        writer,
        interval=config.report.interval,
        measures=config.layers.enabled,
        splits_rows=is_packed(args) and not args.sft,
        own_rates=own_rates,
        machine=run.cluster,
    )


def _say_first(note: str, forward: Callable) -> Callable:
    """`forward`, which prints `note` before its first call: at the end of the start-up, where it is still seen."""
    left = [note]

    @wraps(forward)
    def say_and_forward(*args: Any, **kwargs: Any) -> Any:
        while left:
            print(f"> {left.pop()}", flush=True)
        return forward(*args, **kwargs)

    return say_and_forward


def _pretrain(run: Run, args: argparse.Namespace, model: ModelConfig, datasets: Callable, forward: Callable) -> None:
    container = pretrain_cfg_container_from_args(args, model)
    # As in the model's config: data parallelism leaves gradients that are computed later to whoever computes them.
    container.ddp.delay_wgrad_compute = model.transformer.delay_wgrad_compute
    try:
        pretrain(
            container,
            datasets,
            ModelType.encoder_or_decoder,
            forward,
            get_embedding_ranks=get_embedding_ranks(args, model.transformer),
            store=store_of_process_groups(datetime.timedelta(minutes=args.distributed_timeout_minutes)),
        )
    except (ReplicaMemoryError, SocketLimitError, KernelError, SettingError) as error:
        stop(error)
    except SystemExit:  # Megatron-LM ends early, on all ranks together: at --exit-interval, on a signal, ...
        run.end_training()
        raise
    run.end_training()

"""Balancers in Megatron-Bridge, as a callback of its `pretrain` and `finetune`.

    pretrain(config, forward_step, callbacks=[Balance(experts=ExpertConfig(enabled=True), cluster=cluster)])

Bridge calls methods by name and needs no base class. To resume a run that moved layers, call `resume_layout(config)`
before `pretrain`.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
from megatron.core.utils import unwrap_model

from balancing.cluster import Cluster
from balancing.experts.config import ExpertConfig
from balancing.layers.config import LayerConfig
from balancing.sequences.config import SequenceConfig
from megatron.balanced.loop import Balancers, ExpertBalancer, LayerBalancer, SequenceBalancer
from megatron.balanced.shared.job import Job
from megatron.balanced.shared.log import print_once
from megatron.balanced.shared.model_checks import check_configs
from megatron.balanced.shared.tail import TAIL_FIELD

__all__ = ["Balance", "resume_layout"]


class Balance:
    """The callback, one for each run.

    experts, sequences, layers: settings of each balancer; None leaves it off.
    cluster: hardware speeds.
    report: as for the balancers.
    """

    def __init__(
        self,
        *,
        experts: ExpertConfig | None = None,
        sequences: SequenceConfig | None = None,
        layers: LayerConfig | None = None,
        cluster: Cluster | None = None,
        report: Callable[[Callable[[], dict[str, Any]]], None] | None = None,
    ) -> None:
        self._experts, self._sequences, self._layers = experts, sequences, layers
        self._shared: dict[str, Any] = {"report": report}
        self._cluster = cluster
        self._lengths: HostLengths | None = None
        self.balancers: Balancers | None = None

    def on_data_init_start(self, context: Any) -> None:
        """Make the balancers. The model is wrapped, the optimizer built and a checkpoint loaded. Bridge has not looked
        up the schedule yet."""
        config, model, made = context.state.cfg, context.model, []
        minutes = config.dist.distributed_timeout_minutes
        shared = self._shared | {"job": Job(config.model.seq_length, config.train.micro_batch_size, minutes)}
        if self._experts is not None:
            made.append(
                ExpertBalancer(model, self._experts, cluster=self._cluster, optimizer=config.optimizer, **shared)
            )
        if self._sequences is not None:
            made.append(SequenceBalancer(model, self._sequences, cluster=self._cluster, **shared))
            self._lengths = HostLengths(model)
        if self._layers is not None:
            check_configs("LayerBalancer", config.checkpoint)
            made.append(
                LayerBalancer(
                    model,
                    context.optimizer,
                    context.scheduler,
                    self._layers,
                    layer_spec=_layer_spec(config.model),
                    overrides=_overrides(config, model),
                    steps=config.train.train_iters - context.state.train_state.step,
                    gloo_groups=config.dist.use_gloo_process_groups,
                    **shared,
                )
            )
        self.balancers = Balancers(*made, before=self._lengths and self._lengths.read_from)
        self.balancers.install()

    def on_train_step_end(self, context: Any) -> None:
        """Layers may move here."""
        assert self.balancers is not None
        self.balancers.after_step()

    def on_train_end(self, context: Any) -> None:
        """Close the balancers. The model is plain from now on."""
        assert self.balancers is not None
        self.balancers.close()
        if self._lengths is not None:
            self._lengths.close()


class HostLengths:
    """Sets `packed.lengths` of each micro-batch, so that balanced attention does not wait for the device.

    Bridge's data loader has the ends of packed sequences on the host. Bridge copies them to the device, for the
    `PackedSeqParams` with which it calls the model.

    chunks: the model chunks of this rank.
    """

    def __init__(self, chunks: Sequence[torch.nn.Module]) -> None:
        self._latest: list[list[int] | None] = [None] * len(chunks)  # by chunk, until its forward pass
        self._hooks = [
            model.register_forward_pre_hook(self._setter(chunk), with_kwargs=True)
            for chunk, model in enumerate(unwrap_model(list(chunks)))
        ]

    def read_from(self, call: dict[str, Any]) -> None:
        """Read the batches of a schedule as it takes them. call: its arguments; the iterators are replaced."""
        given = call["data_iterator"]
        if isinstance(given, list):
            call["data_iterator"] = [batches and self._batches(batches, chunk) for chunk, batches in enumerate(given)]
        elif given is not None:
            call["data_iterator"] = self._batches(given, 0)

    def close(self) -> None:
        while self._hooks:
            self._hooks.pop().remove()

    def _batches(self, batches: Iterator, chunk: int) -> Iterator:
        while (batch := next(batches, None)) is not None:  # Megatron-LM's RerunDataIterator has no __iter__
            self._latest[chunk] = _lengths(batch)
            yield batch

    def _setter(self, chunk: int) -> Callable[[Any, tuple[Any, ...], dict[str, Any]], None]:
        def set_lengths(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            lengths, self._latest[chunk] = self._latest[chunk], None
            packed: Any = kwargs.get("packed_seq_params")
            if lengths is not None and isinstance(packed, PackedSeqParams):
                packed.lengths = lengths

        return set_lengths


def _lengths(batch: dict[str, Any]) -> list[int] | None:
    """Tokens of each sequence of a batch, with its padding. None if the batch is not packed, or its ends are on the
    device, or of Bridge's older format, which it cuts on the device."""
    ends = batch.get("cu_seqlens_q_padded")
    ends = batch.get("cu_seqlens_q") if ends is None else ends
    if ends is None or ends.device.type != "cpu":
        return None
    return ends.squeeze().diff().tolist()


_STAGES, _CHUNKS = "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size"
# What a layout depends on, and the value that None stands for.
_SIZES = {"num_layers": None, TAIL_FIELD: 0, _STAGES: 1, _CHUNKS: 1}


def resume_layout(config: Any) -> None:
    """Set the pipeline layout in `config` to that of the checkpoint that `pretrain` resumes from. All ranks call it
    before `pretrain`. It does nothing without a checkpoint, and prints a line if the run has other sizes."""
    from megatron.bridge.training.utils import checkpoint_utils as files

    folder = config.checkpoint.load
    if not files.checkpoint_exists(folder):
        return
    if not files.is_checkpoint_iteration_directory(folder):
        step = config.checkpoint.ckpt_step
        if step is None:
            step = files.read_train_state(files.get_checkpoint_train_state_filename(folder, prefix="latest")).step
        folder = files.get_checkpoint_name(folder, step)
    saved = files.read_run_config(files.get_checkpoint_run_config_filename(folder))["model"]
    layout = saved.get("pipeline_model_parallel_layout")
    if layout is None:
        return
    sizes = {name: getattr(config.model, name, None) or none for name, none in _SIZES.items()}
    own = config.model.pipeline_model_parallel_layout
    if own is not None and sizes[_CHUNKS] == 1:  # Megatron-LM derives the number of chunks
        along = own if isinstance(own, list) else PipelineParallelLayerLayout.parse_str_to_list(str(own))
        sizes[_CHUNKS] = max(1, len(along) // sizes[_STAGES])
    for name, now in sizes.items():
        then = saved.get(name) or _SIZES[name]
        if then != now:
            print_once(f"> the checkpoint's layout {layout} is left alone: it has {name}={then}, and this run {now}")
            return
    config.model.pipeline_model_parallel_layout = layout


def _layer_spec(provider: Any) -> Callable[[int | None], Any]:
    """Virtual stage -> layer spec, as Bridge's model provider builds it."""

    def layer_spec(vp_stage: int | None) -> Any:
        spec = provider.transformer_layer_spec
        if not callable(spec):
            return spec
        takes_stage = "vp_stage" in inspect.signature(spec).parameters
        return spec(provider, vp_stage=vp_stage) if takes_stage else spec(provider)

    return layer_spec


def _overrides(config: Any, chunks: Any) -> Any:
    """The `config_overrides` that Bridge passed to its optimizer."""
    from megatron.bridge.training.config import OptimizerConfigOverrideProviderContext as Context

    if getattr(config.model, "use_mup", False):
        raise ValueError("layers cannot move with use_mup in Megatron-Bridge; drop use_mup or the settings of layers")
    found = Context(config.scheduler, config.optimizer, chunks)
    return config.optimizer_config_override_provider.build_config_overrides(found)

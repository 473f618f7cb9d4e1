"""Balancers in Megatron-Bridge, as a callback of its `pretrain` and `finetune`.

    pretrain(config, forward_step, callbacks=[Balance(experts=ExpertConfig(enabled=True), cluster=cluster)])

Bridge calls methods by name and needs no base class. To resume a run that moved layers, call `resume_layout(config)`
before `pretrain`.
"""

import inspect
from collections.abc import Callable
from typing import Any

from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

from balancing.cluster import Cluster
from balancing.experts.config import ExpertConfig
from balancing.layers.config import LayerConfig
from balancing.sequences.config import SequenceConfig
from megatron.balanced.loop import Balancers, ExpertBalancer, LayerBalancer, SequenceBalancer
from megatron.balanced.shared.job import Job
from megatron.balanced.shared.log import print_once
from megatron.balanced.shared.model_checks import check_configs

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
        self.balancers: Balancers | None = None

    def on_data_init_start(self, context: Any) -> None:
        """Make the balancers. The model is wrapped, the optimizer built and a checkpoint loaded. Bridge has not looked
        up the schedule yet."""
        config, model, made = context.state.cfg, context.model, []
        minutes = config.dist.distributed_timeout_minutes
        shared = self._shared | {"job": Job(config.model.seq_length, config.train.micro_batch_size, minutes)}
        if self._experts is not None:
            made.append(ExpertBalancer(model, self._experts, cluster=self._cluster, **shared))
        if self._sequences is not None:
            made.append(SequenceBalancer(model, self._sequences, cluster=self._cluster, **shared))
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
                    steps=config.train.train_iters,
                    gloo_groups=config.dist.use_gloo_process_groups,
                    **shared,
                )
            )
        self.balancers = Balancers(*made)
        self.balancers.install()

    def on_train_step_end(self, context: Any) -> None:
        """Layers may move here."""
        assert self.balancers is not None
        self.balancers.after_step()

    def on_train_end(self, context: Any) -> None:
        """Close the balancers. The model is plain from now on."""
        assert self.balancers is not None
        self.balancers.close()


_STAGES, _CHUNKS = "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size"
# What a layout depends on, and the value that None stands for.
_SIZES = {"num_layers": None, "mtp_num_layers": 0, _STAGES: 1, _CHUNKS: 1}


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

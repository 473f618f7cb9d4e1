"""Whether a layer's attention can be captured as CUDA graphs (`balancing.sequences.engine.captured`)."""

from typing import Any

from balancing.sequences.config import SequenceConfig

__all__ = ["check_graphs"]


def check_graphs(config: SequenceConfig, model: Any, *, nccl: bool, timed: bool) -> None:
    """Raise ValueError if the settings ask for CUDA graphs where they cannot be captured.

    model: its config, or Megatron-LM's arguments.
    nccl: whether ranks exchange keys and values by NCCL.
    timed: whether a report times waits and kernels.
    """
    if not (config.enabled and config.attention_cuda_graphs):
        return
    setting = "sequences.attention_cuda_graphs"
    if not nccl:
        raise ValueError(f"{setting} captures messages of NCCL on GPUs, which this run does not have; drop it")
    if timed:
        raise ValueError(
            f"{setting} is incompatible with --balance-report: waits and kernels inside a CUDA graph have no times; "
            "drop one of the two"
        )
    from megatron.balanced.sequences.shape import latent_shape  # imports megatron.core, before which a device is chosen

    if latent_shape(model) is not None:
        raise ValueError(
            f"{setting} does not capture attention that exchanges latents (--multi-latent-attention); drop it"
        )

"""Programs of a plan for the layers of a model, without and with a sliding window."""

from typing import Any, NamedTuple

import torch.distributed as dist
from megatron.core import mpu
from megatron.core.transformer.transformer_config import TransformerConfig

from balancing.cluster import Cluster
from balancing.sequences import AttentionShape, SequenceAttention, SequencePlan
from balancing.sequences.config import SequenceConfig
from balancing.sequences.engine.rank_program import RankProgram, TokenBytes, compile_rank
from balancing.sequences.window import in_window

__all__ = ["Programs", "attentions_of", "compile_layers", "routing_of", "token_bytes"]


class Programs(NamedTuple):
    """Plans and this rank's programs.

    whole: for layers without a sliding window; None if the model has none.
    windowed: for layers with a sliding window; None if the model has none. The same object as `whole` if the window
        hides nothing.
    """

    whole: tuple[SequencePlan, RankProgram] | None
    windowed: tuple[SequencePlan, RankProgram] | None


def compile_layers(plan: SequencePlan, shape: AttentionShape, **options: Any) -> Programs:
    """The programs for a plan. options: as in `compile_rank`."""
    of_window = plan if shape.window is None else in_window(plan, shape.window)
    whole = windowed = None
    if shape.windowed_layers < shape.layers or of_window is plan:
        whole = plan, compile_rank(plan, **options)
    if shape.windowed_layers:
        windowed = whole if of_window is plan else (of_window, compile_rank(of_window, **options))
    return Programs(whole, windowed)


def attentions_of(
    programs: Programs, process_group: dist.ProcessGroup, *, timed: bool
) -> tuple[SequenceAttention | None, SequenceAttention | None]:
    """Attention of layers without and with a window; None if the model has no such layers.

    process_group: the ranks of the plan. timed: as in `SequenceAttention`.
    """
    whole, windowed = (
        kind and SequenceAttention(kind[0], program=kind[1], process_group=process_group, timed=timed)
        for kind in programs
    )
    return whole, whole if programs.windowed is programs.whole else windowed


def routing_of(config: SequenceConfig, cluster: Cluster) -> str | int:
    """The routing between nodes that `config` asks for, as in `compile_rank`."""
    named: dict[int, str] = {0: "auto", 1: "off"}
    return named.get(config.routing, config.routing) if cluster.nodes > 1 else "off"


def token_bytes(shape: AttentionShape, model: TransformerConfig) -> TokenBytes:
    """Bytes of a token in the attention of this rank, for routing. If ranks exchange latents, the bytes of keys and
    values are those of latents."""
    ways, item_bytes = mpu.get_tensor_model_parallel_world_size(), model.params_dtype.itemsize
    heads, kv_heads = (max(number // ways, 1) for number in (shape.heads, shape.kv_heads))
    found = TokenBytes.of(
        heads=heads,
        kv_heads=kv_heads,
        head_size=shape.head_size,
        item_bytes=item_bytes,
        value_size=shape.value_size,
    )
    if shape.latent is None:
        return found
    return found._replace(kv=(shape.latent.size + shape.latent.shared) * item_bytes)

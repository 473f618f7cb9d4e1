"""Plans of sequences and their programs, for the layers of a model on one rank."""

from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

from megatron.core import mpu
from megatron.core.transformer.transformer_config import TransformerConfig

from balancing.cluster import Cluster
from balancing.sequences import AttentionShape, SequencePlan, plan_attention, plan_sequences
from balancing.sequences.config import SequenceConfig
from balancing.sequences.engine.compiler import RankProgram, compile_rank
from balancing.sequences.engine.kernel_trial import AttentionHeads
from balancing.sequences.engine.program import TokenBytes
from balancing.sequences.planners.stay import Lengths, zigzag
from balancing.sequences.window import in_window

__all__ = ["Planner", "Programs", "bytes_of_token", "heads_of"]


class Programs(NamedTuple):
    """Plans and this rank's programs.

    whole: for layers without a sliding window; None if the model has none.
    windowed: for layers with a sliding window; None if the model has none. The same object as `whole` if the window
        hides nothing.
    """

    whole: tuple[SequencePlan, RankProgram] | None
    windowed: tuple[SequencePlan, RankProgram] | None


@dataclass(frozen=True)
class Planner:
    """Makes the plans of one rank. It is pickled into the workers of data loaders.

    config: settings of sequence balancing.
    cluster: the ranks that share sequences.
    rank: index of this rank among them.
    shape: of the model's attention.
    token_bytes: of a token in the attention of this rank.
    """

    config: SequenceConfig
    cluster: Cluster
    rank: int
    shape: AttentionShape
    token_bytes: TokenBytes

    def plan(self, lengths: tuple[int, ...]) -> SequencePlan:
        """The plan of a micro-batch whose tokens may be anywhere. lengths: tokens of each document."""
        return plan_sequences(
            lengths,
            self.cluster,
            shape=self.shape,
            method=self.config.planner,
            token_capacity=self.config.token_capacity or None,
            chunk=self.config.chunk or None,
        )

    def plan_in_place(self, lengths: Lengths) -> SequencePlan:
        """The plan of a micro-batch whose tokens are where a loop has put them.

        lengths: tokens of the sequences of each data-parallel rank.
        """
        linear = zigzag(lengths, self.cluster.world_size // len(lengths))
        flat = tuple(chain.from_iterable(lengths))
        return plan_attention(flat, linear, self.cluster, shape=self.shape, method=self.config.planner)

    def compile(self, plan: SequencePlan) -> Programs:
        """The programs of this rank for a plan."""
        shape = self.shape
        of_window = plan if shape.window is None else in_window(plan, shape.window)
        whole = windowed = None
        if shape.windowed_layers < shape.layers or of_window is plan:
            whole = plan, self._compile(plan)
        if shape.windowed_layers:
            windowed = whole if of_window is plan else (of_window, self._compile(of_window))
        return Programs(whole, windowed)

    def _compile(self, plan: SequencePlan) -> RankProgram:
        named: dict[int, str] = {0: "auto", 1: "off"}
        routing = named.get(self.config.routing, self.config.routing) if self.cluster.nodes > 1 else "off"
        return compile_rank(plan, self.rank, self.cluster, routing, self.token_bytes)


def heads_of(shape: AttentionShape, model: TransformerConfig) -> AttentionHeads:
    """The heads of attention on this rank."""
    ways = mpu.get_tensor_model_parallel_world_size()
    heads, kv_heads = (max(number // ways, 1) for number in (shape.heads, shape.kv_heads))
    sizes = shape.head_size, shape.value_size
    return AttentionHeads(model.params_dtype, heads, kv_heads, *sizes, shape.window is not None)


def bytes_of_token(shape: AttentionShape, model: TransformerConfig) -> TokenBytes:
    """Bytes of a token in the attention of this rank, for routing. If ranks exchange latents, the bytes of keys and
    values are those of latents."""
    heads, item_bytes = heads_of(shape, model), model.params_dtype.itemsize
    found = TokenBytes.of(
        heads=heads.heads,
        kv_heads=heads.kv_heads,
        head_size=shape.head_size,
        item_bytes=item_bytes,
        value_size=shape.value_size,
    )
    if shape.latent is None:
        return found
    return found._replace(kv=(shape.latent.size + shape.latent.shared) * item_bytes, latents=True)

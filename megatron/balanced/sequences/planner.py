"""Plans of sequences and their programs, for the layers of a model on one rank."""

from dataclasses import dataclass
from itertools import chain
from operator import itemgetter

from balancing.cluster import Cluster
from balancing.sequences import AttentionShape, SequencePlan, plan_attention, plan_sequences
from balancing.sequences.config import SequenceConfig
from balancing.sequences.engine.compiler import RankProgram, compile_rank
from balancing.sequences.planners.minimal_reshard import Lengths, zigzag, zigzag_of_rows
from balancing.sequences.sequence_plan import layer_kinds, same_exchange

__all__ = ["Planner", "Programs"]

# For each kind of layers (`layer_kinds`) the plan and this rank's program; None if the model has no such layers. Kinds
# with the same plan have the same object.
Programs = tuple[tuple[SequencePlan, RankProgram] | None, ...]


@dataclass(frozen=True)
class Planner:
    """Makes the plans of one rank. It is pickled into the workers of data loaders.

    config: settings of sequence balancing.
    cluster: the ranks that share sequences.
    rank: index of this rank among them.
    shape: shape of the model's attention.
    cuts_documents: whether Megatron-LM cuts each document over context-parallel ranks, and not the packed row.
    """

    config: SequenceConfig
    cluster: Cluster
    rank: int
    shape: AttentionShape
    cuts_documents: bool = False

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

    def plan_as_drawn(self, lengths: Lengths) -> SequencePlan:
        """The plan of a micro-batch whose tokens are where Megatron-LM would have them.

        lengths: tokens of the documents of each data-parallel rank.
        """
        ranks = self.cluster.world_size
        ways = ranks // len(lengths)
        cut = zigzag if self.cuts_documents or ways == 1 else zigzag_of_rows
        layout = tuple(sorted(cut(lengths, ways), key=itemgetter(3, 0, 1)))
        flat = tuple(chain.from_iterable(lengths))
        exchange, made_for = same_exchange(layout, flat, "gather"), (self.cluster, self.shape)
        return SequencePlan(flat, ranks, "given", layout, layout, exchange, None, None, *made_for)

    def compile(self, plan: SequencePlan) -> Programs:
        """The programs of this rank for a plan."""
        kinds = layer_kinds(plan, self.shape)
        compiled = {id(own): (own, self._compile(own)) for own, layers in kinds if layers}
        return tuple(compiled.get(id(own)) for own, _ in kinds)

    def _compile(self, plan: SequencePlan) -> RankProgram:
        named: dict[int, str] = {0: "auto", 1: "off"}
        return compile_rank(plan, self.rank, routing=named.get(self.config.routing, self.config.routing))

"""Mamba layers whose documents are spread over ranks (`M` in `--hybrid-layer-pattern`, `--balance-sequences`).

A Mamba layer passes its state from each token of a document to the next, so it needs whole documents, but a rank has
only pieces. Its heads are independent. As in Megatron-LM's context parallelism, an all-to-all gives each rank all
tokens of some heads, and another one returns the outputs. Megatron-LM's supports only the zig-zag of Transformer
Engine. This one sorts tokens by document for any plan, and is one all-to-all instead of five.
"""

import inspect
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.ssm.mamba_context_parallel import MambaContextParallel, _all_to_all_cp2hp, _all_to_all_hp2cp

from balancing.sequences.sequence_plan import SequencePlan

__all__ = ["DocumentOrder", "document_rows", "with_whole_documents"]


@dataclass(frozen=True)
class DocumentOrder:
    """The permutation of a micro-batch's rows from rank after rank to document after document.

    process_group: the ranks that share the micro-batch.
    order: int32 [row of all ranks], where each row comes from.
    back: the inverse.
    """

    process_group: torch.distributed.ProcessGroup
    order: torch.Tensor
    back: torch.Tensor


def document_rows(plan: SequencePlan, ranks: int, rows: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """`order` and `back` of a DocumentOrder, and the number of each row's document in that order, all int32.

    rows: of each rank. Padding comes last, as a document of its own.
    """
    pieces, padding = [], []
    for rank in range(ranks):
        first = rank * rows
        for shard in plan.shards(rank, linear=True):
            pieces.append((shard.sequence, shard.start, first, shard.tokens))
            first += shard.tokens
        padding.append(np.arange(first, (rank + 1) * rows, dtype=np.int32))
    pieces.sort()
    starts, sizes = (np.array([piece[column] for piece in pieces]) for column in (2, 3))
    ends = np.array([*accumulate(sizes.tolist())])
    order = np.arange(ends[-1]) + np.repeat(starts - ends + sizes, sizes)
    order = np.concatenate([order, *padding]).astype(np.int32)
    back = np.empty_like(order)
    back[order] = np.arange(len(order), dtype=np.int32)
    documents = np.repeat([piece[0] for piece in pieces], sizes)
    documents = np.pad(documents, (0, len(order) - len(documents)), constant_values=len(plan.lengths))
    return order, back, documents.astype(np.int32)


class _OfDocuments(MambaContextParallel):
    """The all-to-alls of one layer."""

    def pre_conv_ssm(self, input_: torch.Tensor, packed_seq_params: PackedSeqParams | None = None) -> torch.Tensor:
        """[rows, 1, features] of all heads -> [rows of all ranks, 1, features] of this rank's heads, by documents."""
        planned: Any = packed_seq_params
        if self.cp_size > 1:
            inner, states = self.d_inner_local_tp, self.ngroups_local_tp * self.d_state
            gate, values, keys, queries, steps = input_.split([inner, inner, states, states, self.nheads_local_tp], -1)
            keys, queries = (self._of_ranks(part) for part in (keys, queries))
            parts = [part.unflatten(-1, (self.cp_size, -1)) for part in (gate, values, keys, queries, steps)]
            input_ = _all_to_all_cp2hp(torch.cat(parts, dim=-1).flatten(-2), self.cp_group)
        return input_.index_select(0, planned.order.order)

    def _of_ranks(self, groups: torch.Tensor) -> torch.Tensor:
        """Repeat the features that a group of heads shares for each rank that has heads of the group."""
        if self.group_repeat_count == 1:
            return groups
        apart = groups.unflatten(-1, (self.ngroups_local_tp, self.d_state))
        return apart.repeat_interleave(self.group_repeat_count, dim=-2).flatten(-2)

    def post_conv_ssm(self, input_: torch.Tensor, packed_seq_params: PackedSeqParams | None = None) -> torch.Tensor:
        planned: Any = packed_seq_params
        output = input_.index_select(0, planned.order.back)
        return _all_to_all_hp2cp(output, self.cp_group) if self.cp_size > 1 else output


def with_whole_documents(mixer: type) -> type:
    """A subclass of a class of Mamba mixers, whose layers get whole documents."""

    class InWholeDocuments(mixer):  # type: ignore[misc, valid-type]
        def forward(
            self, hidden_states: torch.Tensor, *args: Any, packed_seq_params: PackedSeqParams | None = None, **rest: Any
        ) -> Any:
            order = getattr(packed_seq_params, "order", None)
            assert order is not None, "a Mamba layer has not been told the order of documents"
            if not isinstance(self.cp, _OfDocuments) or self.cp.cp_group is not order.process_group:
                kept = inspect.signature(MambaContextParallel).parameters.keys() - {"cp_group"}
                self.cp = _OfDocuments(order.process_group, **{name: getattr(self.cp, name) for name in kept})
            return super().forward(hidden_states, *args, packed_seq_params=packed_seq_params, **rest)

    return InWholeDocuments

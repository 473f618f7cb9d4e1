"""Micro-batches of documents cut for one context-parallel rank as a plan says, in the data loader's worker.

Megatron-LM's datasets, samplers and loaders stay as they are. A loader asks its dataset for all samples of a
micro-batch at once where it can: here they are packed into one sequence, planned, and reduced to the rows of this rank.
Labels were shifted by the dataset, before anything is cut. All of this runs ahead of the step.
"""

import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from balancing.sequences.ahead import Planned
from balancing.sequences.sequence_plan import SequencePlan

__all__ = ["PlannedDataset", "Rows", "positions", "receive"]

_INTEGERS = ("tokens", "labels", "position_ids")


@dataclass(frozen=True)
class Rows:
    """How many rows a rank holds of a micro-batch. They are the same on all ranks, whatever is padding.

    multiple: of what, for tensor-parallel ranks share them. fixed: as many as its samples have tokens, divided by the
    ranks, where Megatron-LM counts on it: in pipeline messages and in the allgather dispatcher.
    """

    ranks: int
    multiple: int
    fixed: bool

    def of(self, plan: SequencePlan, sample_tokens: int) -> int:
        """Rows for `plan`, made of samples with `sample_tokens` tokens together, padding included."""
        if self.fixed:
            return sample_tokens // self.ranks
        return -(-int(plan.linear_tokens.max()) // self.multiple) * self.multiple


class PlannedDataset(torch.utils.data.Dataset):
    """Any of Megatron's GPT datasets, read a micro-batch at a time.

    plan: lengths -> plan and way. rank: of the context-parallel group. padding: the token that its samples end in where
    they are not full, None when they are always full.
    """

    def __init__(
        self,
        dataset: torch.utils.data.Dataset,
        plan: Callable[[Sequence[int]], Planned],
        rank: int,
        rows: Rows,
        padding: int | None,
    ) -> None:
        self._dataset, self._plan, self._rank, self._rows, self._padding = dataset, plan, rank, rows, padding
        for name in ("split", "index_split"):  # by which Megatron knows training from validation
            if hasattr(dataset, name):
                setattr(self, name, getattr(dataset, name))

    def __len__(self) -> int:
        return len(self._dataset)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        """The micro-batch of samples `indices`, a list of one: this rank's rows, its plan and way, what they took."""
        samples = [self._dataset[index] for index in indices]
        kept = [self._without_padding(sample) for sample in samples]
        lengths = [length for sample, tokens in zip(samples, kept, strict=True) for length in _lengths(sample, tokens)]
        plan, way, milliseconds = self._plan(lengths)
        own = _own_tokens(plan, self._rank)
        rows = self._rows.of(plan, sum(len(sample["tokens"]) for sample in samples))
        batch: dict[str, Any] = {}
        for name in (*_INTEGERS, "loss_mask"):
            packed = torch.cat([sample[name][:tokens] for sample, tokens in zip(samples, kept, strict=True)])
            batch[name] = packed.new_zeros(rows)
            batch[name][: len(own)] = packed[own]
        return [batch | {"plan": pickle.dumps((plan, way)), "plan_ms": milliseconds}]

    def _without_padding(self, sample: dict[str, torch.Tensor]) -> int:
        """How many tokens of a sample are left without the padding it ends in. Nothing real attends to that."""
        tokens = sample["tokens"]
        if self._padding is None:
            return len(tokens)
        real = torch.nonzero((tokens != self._padding) | (sample["loss_mask"] > 0))
        return max(int(real[-1]) + 1 if len(real) else 0, self._rows.ranks)  # no rank is without a token


def _lengths(sample: dict[str, torch.Tensor], tokens: int) -> list[int]:
    """Tokens of each document in the first `tokens` of a sample, one document where it does not tell."""
    if "cu_seqlens" not in sample:
        return [tokens]
    bounds = torch.unique_consecutive(sample["cu_seqlens"].clamp(max=tokens))
    return torch.diff(bounds).tolist()


def _own_tokens(plan: SequencePlan, rank: int) -> torch.Tensor:
    """Where the rank's tokens stand in the packed micro-batch, in the order in which the rank holds them."""
    lengths = torch.tensor(plan.lengths)
    first = (torch.cumsum(lengths, 0) - lengths).tolist()
    return torch.cat(
        [
            torch.arange(first[shard.sequence] + shard.start, first[shard.sequence] + shard.stop)
            for shard in plan.shards(rank, linear=True)
        ]
    )


def positions(plan: SequencePlan, rank: int, rows: int) -> torch.Tensor:
    """int [rows]: each row's position in its document; 0 in padding."""
    own = [torch.arange(shard.start, shard.stop) for shard in plan.shards(rank, linear=True)]
    return torch.nn.functional.pad(torch.cat(own), (0, rows - int(plan.linear_tokens[rank])))


def receive(
    sample: dict[str, Any] | None, group: dist.ProcessGroup, source: int, device: Any
) -> tuple[dict[str, torch.Tensor], bytes, float]:
    """A micro-batch on all tensor-parallel ranks: its rows [1, rows], its pickled plan and way, and milliseconds of
    planning.

    sample: what the loader gave, on global rank `source`; None on the others.
    """
    plan, milliseconds = b"", 0.0
    batch: dict[str, torch.Tensor] = {}
    if sample is not None:
        (plan,), milliseconds = sample["plan"], float(sample["plan_ms"])
        batch = {name: sample[name].cuda(non_blocking=True) for name in (*_INTEGERS, "loss_mask")}
    if dist.get_world_size(group) == 1:
        return batch, plan, milliseconds

    def share(tensor: torch.Tensor) -> torch.Tensor:
        dist.broadcast(tensor, source, group=group)
        return tensor

    sizes = [batch["tokens"].shape[1], len(plan)] if sample is not None else [0, 0]
    rows, length = share(torch.tensor(sizes, device=device)).tolist()
    empty = dict(device=device)
    integers = (
        torch.cat([batch[name] for name in _INTEGERS])
        if sample is not None
        else torch.empty(len(_INTEGERS), rows, dtype=torch.int64, **empty)
    )
    mask = batch["loss_mask"] if sample is not None else torch.empty(1, rows, dtype=torch.float32, **empty)
    pickled = torch.frombuffer(bytearray(plan), dtype=torch.uint8) if sample is not None else torch.empty(length).byte()
    integers, mask, pickled = share(integers), share(mask), share(pickled.to(device))
    batch = dict(zip(_INTEGERS, integers.split(1), strict=True)) | {"loss_mask": mask}
    return batch, plan or pickled.cpu().numpy().tobytes(), milliseconds

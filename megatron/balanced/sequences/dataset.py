"""Micro-batches of documents, planned and cut for one rank in the data loader's worker, ahead of the step.

Megatron-LM's datasets, samplers and loaders are unchanged. PyTorch's loader asks a dataset for all samples of a
micro-batch at once if the dataset has `__getitems__`. There `PlannedDataset` packs the samples of all ranks that share
the micro-batch (`domain`) into one sequence, plans it, and returns the rows of this rank. Labels are shifted before
documents are cut, and so are documents of which a model predicts further tokens.

A plan needs the lengths of all documents of a micro-batch, which a GPT dataset's index has. Then a rank needs only the
tokens of its shards: a rank of a domain of N that read whole samples would read N times what it trains on.
"""

import pickle
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, groupby
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
import torch
from megatron.core.datasets.blended_dataset import BlendedDataset
from megatron.core.datasets.gpt_dataset import GPTDataset, MockGPTDataset

from balancing.kernels.pairs import area_of_first
from balancing.sequences.plan import PlanCache
from balancing.sequences.sequence_plan import SequencePlan
from megatron.balanced.sequences.domain import Domain, Sample
from megatron.balanced.sequences.micro_batch_schedule import DrawnSteps, Steps, WholeSteps
from megatron.balanced.sequences.planner import Planner

__all__ = [
    "INTEGERS",
    "PlannedBatch",
    "PlannedDataset",
    "Rows",
    "document_lengths",
    "read_tokens",
    "sample_areas",
    "sample_costs",
]

INTEGERS = ("tokens", "labels", "position_ids")


@dataclass(frozen=True)
class Rows:
    """Rows of a rank in a micro-batch, padding included; the same number on all ranks.

    ranks: number of ranks that share micro-batches.
    multiple: rows are a multiple of it, since tensor-parallel ranks split them.
    fixed: whether the number of rows is always the tokens of the samples divided by the ranks. Pipeline messages and
        the allgather dispatcher of Megatron-LM require this.
    shifts: the most tokens by which rows are shifted in their documents, beside labels.
    """

    ranks: int
    multiple: int
    fixed: bool
    shifts: int = 0

    def of(self, plan: SequencePlan, sample_tokens: int) -> int:
        """Rows for `plan`. sample_tokens: tokens of its samples together, padding included."""
        if self.fixed:
            return sample_tokens // self.ranks
        return -(-int(plan.linear_tokens.max()) // self.multiple) * self.multiple


_Costs = Callable[[np.ndarray], np.ndarray | None]


def _unknown(samples: np.ndarray) -> None:
    """Costs of samples that are not asked for. They are left where they were drawn."""


class _Document(NamedTuple):
    """Tokens [start, start + tokens) of a sample. sample: its index among the drawn samples."""

    sample: int
    start: int
    tokens: int


class _Drawn(NamedTuple):
    """The samples of a micro-batch or of a step.

    documents: the documents of all samples, in order.
    read: index of a sample -> its tensors, if its documents are only known from its tokens.
    size: tokens of all samples, padding included.
    """

    samples: list[Sample]
    documents: list[_Document]
    read: dict[int, dict[str, torch.Tensor]]
    size: int


class PlannedBatch(NamedTuple):
    """The plan of a micro-batch, as it is pickled.

    plan: the plan of its documents.
    programs: compiled from the plan for this rank.
    origins, numbers: [document], its origin, and its index among the documents that were drawn together.
    """

    plan: SequencePlan
    programs: Any
    origins: tuple[int, ...]
    numbers: tuple[int, ...]


class _Places(NamedTuple):
    """Where the tokens of a rank come from, int64 [token] each, in the order in which the rank holds them.

    samples: index of the token's sample among the drawn samples.
    tokens: index of the token in the sample.
    ends: end of the token's document in the sample; a shift goes no further.
    """

    samples: np.ndarray
    tokens: np.ndarray
    ends: np.ndarray


class PlannedDataset(torch.utils.data.Dataset):
    """Any of Megatron's GPT datasets, read a micro-batch at a time.

    dataset: of samples, tensors by name.
    planner: makes plans and this rank's programs from lengths.
    domain: the ranks that share micro-batches.
    rows: of each rank.
    padding: the token that samples are padded with at their end; None if they are always full.
    steps: distributes the documents of a step, or whole micro-batches of Megatron-LM, over its micro-batches. None
        leaves them where they were drawn.
    drawn_steps: the steps whose tokens stay where Megatron-LM draws them; None for no step.
    """

    def __init__(
        self,
        dataset: torch.utils.data.Dataset,
        planner: Planner,
        domain: Domain,
        rows: Rows,
        padding: int | None,
        steps: Steps | WholeSteps | None = None,
        drawn_steps: DrawnSteps | None = None,
    ) -> None:
        self._dataset, self._domain, self._drawn_steps = dataset, domain, drawn_steps
        self._plan = PlanCache(planner.plan, planner.compile)
        self._plan_as_drawn = PlanCache(planner.plan_as_drawn, planner.compile)  # type: ignore[arg-type]
        self._rows, self._padding, self._steps = rows, padding, steps
        # Of the latest step: its first sample, and the micro-batch of each document, or the samples of each micro-batch
        self._latest: tuple[int, _Drawn, np.ndarray] | None = None
        self._latest_whole: tuple[int, list[list[Sample]]] | None = None
        for name in ("split", "index_split"):  # Megatron distinguishes training from validation by them
            if hasattr(dataset, name):
                setattr(self, name, getattr(dataset, name))

    def __len__(self) -> int:
        return len(self._dataset)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        """A list of one, the micro-batch in which this rank has samples `indices`. It has this rank's rows, followed by
        the rows of each shift (0 where a document has ended), each padded at its end, a pickled `PlannedBatch` as
        "plan", and the milliseconds of planning as "plan_ms"."""
        begin = time.perf_counter()
        stays = self._drawn_steps is not None and self._drawn_steps(indices[0])
        drawn, chosen = self._micro_batch(indices, stays)
        spent = (time.perf_counter() - begin) * 1e3
        documents = [drawn.documents[number] for number in chosen]
        origins = tuple(drawn.samples[document.sample].origin for document in documents)
        lengths = [document.tokens for document in documents]
        if stays:
            by_origin = groupby(zip(origins, lengths, strict=True), itemgetter(0))
            lengths_by_origin = [tuple(length for _, length in group) for _, group in by_origin]
            plan, programs, milliseconds = self._plan_as_drawn(lengths_by_origin)  # type: ignore[arg-type]
        else:
            plan, programs, milliseconds = self._plan(lengths)
        rows = self._rows.of(plan, drawn.size)
        size = rows * (1 + self._rows.shifts)
        batch = {name: torch.zeros(size, dtype=torch.int64) for name in INTEGERS}
        batch["loss_mask"] = torch.zeros(size, dtype=torch.float32)
        places = _places(documents, _packed_tokens(plan, self._domain.rank))
        for at in np.unique(places.samples).tolist():
            (own_rows,) = np.nonzero(places.samples == at)
            wanted = []  # for each shift, rows and the tokens of the sample that go there
            for shift in range(1 + self._rows.shifts):
                inside = own_rows[places.tokens[own_rows] + shift < places.ends[own_rows]]
                wanted.append((shift * rows + inside, places.tokens[inside] + shift))
            every_token = np.unique(np.concatenate([tokens for _, tokens in wanted]))
            sample = drawn.read.get(at) or read_tokens(self._dataset, drawn.samples[at].index, every_token)
            for name, values in batch.items():
                for into, tokens in wanted:
                    values[into] = sample[name][tokens]
        # Padding repeats a token of the micro-batch: the gradient of a weight is a sum over all rows, and 0 times the
        # embedding of a token that the data does not have may be NaN.
        batch["tokens"].view(-1, rows)[:, len(places.samples) :] = batch["tokens"][0]
        planned = pickle.dumps(PlannedBatch(plan, programs, origins, chosen))
        return [batch | {"plan": planned, "plan_ms": milliseconds + spent}]

    def _micro_batch(self, indices: Sequence[int], stays: bool) -> tuple["_Drawn", tuple[int, ...]]:
        """Samples and indices of the documents that run in the micro-batch in which this rank has `indices`. stays:
        whether they are those that Megatron-LM has there."""
        areas: _Costs = _unknown if stays else partial(sample_areas, self._dataset)
        if not isinstance(self._steps, Steps):
            if self._steps is None:
                samples = self._domain.samples(indices, areas)
            else:
                first, micro_batch = self._steps.place(indices)
                if self._latest_whole is None or self._latest_whole[0] != first:
                    costs: _Costs = partial(sample_costs, self._dataset, cost=self._steps.cost)
                    costs = _unknown if stays else costs
                    self._latest_whole = first, self._steps.of(indices, self._domain, costs)
                samples = self._latest_whole[1][micro_batch]
            drawn = self._draw(samples)
            return drawn, tuple(range(len(drawn.documents)))
        step = self._steps.of(indices, self._domain, areas)
        if self._latest is None or self._latest[0] != step.first:
            drawn = self._draw(step.samples)
            origins = [drawn.samples[document.sample].origin for document in drawn.documents]
            lengths = [document.tokens for document in drawn.documents]
            deal = np.array(origins) // self._domain.origins
            if not stays:
                deal = self._steps.deal(lengths, deal)
            self._latest = step.first, drawn, deal
        _, drawn, deal = self._latest
        return drawn, tuple(np.flatnonzero(deal == step.micro_batch).tolist())

    def _draw(self, samples: list[Sample]) -> "_Drawn":
        documents: list[_Document] = []
        read: dict[int, dict[str, torch.Tensor]] = {}  # samples whose lengths only their tokens tell
        size = 0
        for at, sample in enumerate(samples):
            lengths = document_lengths(self._dataset, sample.index)
            if lengths is None:
                read[at] = self._dataset[sample.index]
                lengths = _lengths(read[at], self._without_padding(read[at]))
                size += len(read[at]["tokens"])
            else:
                size += sum(lengths)
            documents += [
                _Document(at, stop - length, length) for stop, length in zip(accumulate(lengths), lengths, strict=True)
            ]
        return _Drawn(samples, documents, read, size)

    def _without_padding(self, sample: dict[str, torch.Tensor]) -> int:
        """Tokens of a sample without the padding at its end, to which no other token attends."""
        tokens = sample["tokens"]
        if self._padding is None:
            return len(tokens)
        real = torch.nonzero((tokens != self._padding) | (sample["loss_mask"] > 0))
        fewest = self._rows.ranks // self._domain.origins  # so that no rank is without a token
        return max(int(real[-1]) + 1 if len(real) else 0, fewest)


def _lengths(sample: dict[str, torch.Tensor], tokens: int) -> list[int]:
    """Tokens of each document in the first `tokens` of a sample; one document if it has no boundaries."""
    if "cu_seqlens" not in sample:
        return [tokens]
    bounds = torch.unique_consecutive(sample["cu_seqlens"].clamp(max=tokens))
    return torch.diff(bounds).tolist()


def _places(documents: Sequence[_Document], packed: np.ndarray) -> _Places:
    """Where tokens come from. packed: int64 [token], where they are in the packed micro-batch.

    Two ranks share two samples of four tokens. The first has documents of three tokens and one, the second is one:

        sample           0 0 0 0 1 1 1 1
        document         0 0 0 1 2 2 2 2
        token of sample  0 1 2 3 0 1 2 3
        packed           0 1 2 3 4 5 6 7
        rank             0 0 0 1 0 1 1 1

    Rank 0 has tokens [0, 1, 2, 4] of the packed micro-batch. They are tokens [0, 1, 2, 0] of samples [0, 0, 0, 1], and
    their documents end at [3, 3, 3, 4]. Shifted by one, its rows are tokens 1 and 2 of sample 0, nothing, and token 1
    of sample 1.
    """
    begins = np.array([0, *accumulate(document.tokens for document in documents)])
    bounds = np.array([(sample, start, start + tokens) for sample, start, tokens in documents])
    document = np.searchsorted(begins, packed, side="right") - 1
    samples, starts, ends = bounds[document].T
    return _Places(samples, packed - begins[document] + starts, ends)


def _packed_tokens(plan: SequencePlan, rank: int) -> np.ndarray:
    """int64 [token], where the rank's tokens are in the packed micro-batch, in the order in which it holds them."""
    first = [0, *accumulate(plan.lengths)]
    shards = plan.shards(rank, linear=True)  # none on a rank without tokens
    ranges = [(first[shard.sequence] + shard.start, first[shard.sequence] + shard.stop) for shard in shards]
    return np.concatenate([np.zeros(0, np.int64), *(np.arange(*each) for each in ranges)])


# Lengths from the index of Megatron-LM's datasets, and the tokens that a rank needs. Its GPT datasets assemble samples
# from pieces of documents; pieces that this rank does not need are left out.


def document_lengths(dataset: Any, index: int) -> list[int] | None:
    """Tokens of each document of sample `index`, or of the whole sample if its documents attend to each other.

    None for datasets that are neither GPT datasets nor blends of them: their index does not have the lengths.
    """
    dataset, index = _source(dataset, index)
    if type(dataset) not in (GPTDataset, MockGPTDataset):
        return None
    config = dataset.config
    if not config.inter_document_masking:
        return [config.sequence_length]
    if dataset.shuffle_index is None:
        dataset[index]  # maps the index into memory
    number, more = dataset.shuffle_index[index], int(config.add_extra_token_to_sequence)
    (first, begin), (last, end) = dataset.sample_index[number].tolist(), dataset.sample_index[number + 1].tolist()
    lengths = dataset.dataset.sequence_lengths[dataset.document_index[first : last + 1]].tolist()
    # As GPTDataset cuts documents: the token after the sample, which is the label of the last one, is not part of it,
    # and the padding of a validation set's last sample belongs to its last document.
    lengths[-1] = end + more
    lengths[0] -= begin
    lengths[-1] -= more
    if not lengths[-1]:
        lengths.pop()
    if (missing := config.sequence_length - sum(lengths)) > 0:
        lengths = [*lengths[:-1], (lengths[-1] if lengths else 0) + missing]
    return [length for length in lengths if length]


def sample_areas(dataset: Any, indices: np.ndarray) -> np.ndarray | None:
    """int64 [sample], query-key pairs of the documents of many samples at once; None as for `document_lengths`.

    indices: int64 [sample].
    """
    return sample_costs(dataset, indices, area_of_first)


def sample_costs(dataset: Any, indices: np.ndarray, cost: Callable[[np.ndarray], np.ndarray]) -> np.ndarray | None:
    """[sample], the total cost of the documents of each sample; None as for `document_lengths`.

    indices: int64 [sample].
    cost: int64 [document], tokens -> [document].
    """
    if isinstance(dataset, BlendedDataset):
        if dataset.dataset_index is None:
            dataset[int(indices[0])]  # maps the index into memory
        source, place = dataset.dataset_index[indices], dataset.dataset_sample_index[indices]
        blended = np.zeros(len(indices), dtype=cost(np.ones(1, dtype=np.int64)).dtype)
        for number in np.unique(source).tolist():
            part_costs = sample_costs(dataset.datasets[number], place[source == number], cost)
            if part_costs is None:
                return None
            blended[source == number] = part_costs
        return blended
    if type(dataset) not in (GPTDataset, MockGPTDataset):
        return None
    config = dataset.config
    if not config.inter_document_masking:
        return cost(np.full(len(indices), config.sequence_length))
    if dataset.shuffle_index is None:
        dataset[int(indices[0])]
    number = dataset.shuffle_index[indices].astype(np.int64)
    (first, begin), (last, end) = (dataset.sample_index[which].astype(np.int64).T for which in (number, number + 1))
    documents = last - first + 1
    ends = np.cumsum(documents)
    entries = np.arange(ends[-1]) + np.repeat(first - ends + documents, documents)
    lengths = dataset.dataset.sequence_lengths[dataset.document_index[entries]].astype(np.int64)
    lengths[ends - 1] = end  # the label of a sample's last token is not part of it, see `document_lengths`
    lengths[ends - documents] -= begin
    costs = np.add.reduceat(cost(lengths), ends - documents)
    padded = np.add.reduceat(lengths, ends - documents) < config.sequence_length
    for sample in np.flatnonzero(padded).tolist():
        costs[sample] = cost(np.array(document_lengths(dataset, int(indices[sample])) or [0])).sum()
    return np.asarray(costs)


def read_tokens(dataset: Any, index: int, tokens: np.ndarray) -> dict[str, torch.Tensor]:
    """Sample `index`, valid only at `tokens`; other tokens are not read if possible. tokens: int [token], ascending."""
    source, place = _source(dataset, index)
    if type(source) not in (GPTDataset, MockGPTDataset):
        return dataset[index]
    if source.config.reset_position_ids and not source.config.inter_document_masking:  # by the ends of all documents
        return dataset[index]
    breaks = np.flatnonzero(np.diff(tokens) > 1) + 1
    runs = [(int(run[0]), int(run[-1]) + 2) for run in np.split(tokens, breaks)]  # and the label of a run's last token
    whole = source.dataset
    source.dataset = _Parts(whole, runs)
    try:
        return source[place]
    finally:
        source.dataset = whole


def _source(dataset: Any, index: int) -> tuple[Any, int]:
    """The dataset of a blend that has sample `index`, and the sample's index there."""
    while isinstance(dataset, BlendedDataset):
        if dataset.dataset_index is None:
            dataset[index]  # maps the index into memory
        dataset, index = (
            dataset.datasets[dataset.dataset_index[index]],
            int(dataset.dataset_sample_index[index]),
        )
    return dataset, index


class _Parts:
    """Replaces the documents of a dataset while the dataset assembles one sample.

    documents: Megatron-LM's indexed dataset.
    wanted: tokens [start, stop) of the sample, sorted; the others are 0.
    """

    def __init__(self, documents: Any, wanted: Sequence[tuple[int, int]]) -> None:
        self._documents, self._wanted = documents, wanted
        self._at = self._next = 0  # token of the sample, and the first range that has not ended

    def get(self, idx: int, offset: int = 0, length: int | None = None) -> np.ndarray:
        if length is None:
            length = int(self._documents.sequence_lengths[idx]) - offset
        begin, end = self._at, self._at + int(length)
        tokens = np.zeros(end - begin, dtype=np.int64)
        while self._next < len(self._wanted) and self._wanted[self._next][0] < end:
            start, stop = self._wanted[self._next]
            start, upto = max(start, begin), min(stop, end)
            tokens[start - begin : upto - begin] = self._documents.get(
                idx, offset=offset + start - begin, length=upto - start
            )
            if stop > end:
                break
            self._next += 1
        self._at = end
        return tokens

"""Reads the lengths of documents from a dataset's index, and only those tokens that a rank needs.

A plan needs the lengths of all documents of a micro-batch, and then each rank needs the tokens of its shards. Datasets
of Megatron-LM return whole samples, so a rank of a domain of N would read N times what it trains on. The index of a GPT
dataset has the lengths. Its samples are assembled from pieces of documents, and this module leaves out the pieces that
this rank does not need.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from megatron.core.datasets.blended_dataset import BlendedDataset
from megatron.core.datasets.gpt_dataset import GPTDataset, MockGPTDataset

from balancing.sequences.sequence_plan import area_of_first

__all__ = ["document_lengths", "read_tokens", "sample_areas", "sample_costs"]


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
            of_part = sample_costs(dataset.datasets[number], place[source == number], cost)
            if of_part is None:
                return None
            blended[source == number] = of_part
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
    at = np.arange(ends[-1]) + np.repeat(first - ends + documents, documents)
    lengths = dataset.dataset.sequence_lengths[dataset.document_index[at]].astype(np.int64)
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

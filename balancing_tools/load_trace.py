"""Recorded loads, for comparisons of planners: read from a report or from a compact .npz file."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from os import PathLike

import numpy as np

from balancing.experts.split.split import MOST_TOKENS
from balancing.files import output, read_arrays
from balancing.report import History, read_history

__all__ = ["LoadTrace", "read_load_trace", "read_reported_loads", "write_load_trace"]

_COUNTS = ("record", "source_rank", "layer", "micro_batch", "expert")


@dataclass(frozen=True)
class LoadTrace:
    """Loads of a recorded run.

    counts: int [record, source_rank, layer, micro_batch, expert], tokens.
    iteration: int [record], the training iteration of each record.
    layer: int [layer], number of each layer in the model.

    Raises ValueError if shapes disagree, or counts are negative or above MOST_TOKENS.
    """

    counts: np.ndarray
    iteration: np.ndarray
    layer: np.ndarray

    def __post_init__(self) -> None:
        if self.counts.ndim != len(_COUNTS) or self.counts.dtype.kind not in "iu" or not self.counts.size:
            raise ValueError(
                f"counts must be whole numbers [{', '.join(_COUNTS)}], "
                f"not {self.counts.dtype} of shape {self.counts.shape}"
            )
        if self.counts.min() < 0:
            raise ValueError(f"counts must not be negative, but one is {self.counts.min()}")
        if self.counts.max() > MOST_TOKENS:
            raise ValueError(f"counts must be at most {MOST_TOKENS} tokens, but one is {self.counts.max()}")
        for name, axis in (("iteration", 0), ("layer", 2)):
            if getattr(self, name).shape != (self.counts.shape[axis],):
                raise ValueError(f"{name} has shape {getattr(self, name).shape} for {self.counts.shape[axis]} {name}s")

    def on_ranks(self, ranks: int) -> np.ndarray:
        """Counts for another number of ranks: int64 [record, rank, layer, micro_batch, expert].

        For fewer ranks, neighbouring source ranks are merged. For more ranks, each source rank is split into equal
        parts. Raises ValueError if neither number is a multiple of the other.
        """
        counts, sources = self.counts.astype(np.int64), self.counts.shape[1]
        if ranks < 1 or (sources % ranks and ranks % sources):
            raise ValueError(f"the trace has {sources} source ranks, not a multiple or a part of {ranks}")
        if ranks <= sources:
            return counts.reshape(len(counts), ranks, sources // ranks, *counts.shape[2:]).sum(2)
        parts = ranks // sources
        ends = counts[:, :, None] * np.arange(1, parts + 1).reshape(1, 1, parts, 1, 1, 1) // parts
        split = np.diff(ends, axis=2, prepend=0)
        return split.reshape(len(counts), ranks, *counts.shape[2:])


def read_load_trace(path: str | PathLike[str]) -> LoadTrace:
    """Read a .npz file with `counts`, and optionally `iteration` and `layer`, as in `LoadTrace`.

    Raises ValueError, one line that names the file, if it is missing, truncated, or has other contents.
    """
    arrays = read_arrays(path)
    if "counts" not in arrays:
        raise ValueError(f"{path} has no array 'counts' [{', '.join(_COUNTS)}], only {', '.join(arrays) or 'nothing'}")
    counts = arrays["counts"]
    records, layers = (counts.shape[axis] if counts.ndim == len(_COUNTS) else 0 for axis in (0, 2))
    try:
        return LoadTrace(counts, arrays.get("iteration", np.arange(records)), arrays.get("layer", np.arange(layers)))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def write_load_trace(trace: LoadTrace, path: str | PathLike[str], inputs: Iterable[str | PathLike[str]] = ()) -> None:
    """Write a file for `read_load_trace`, with counts in the smallest integer type that holds them.

    inputs: files that must not be overwritten. Raises ValueError if the file cannot be written, like
    `balancing.files.output`.
    """
    kind = np.min_scalar_type(int(trace.counts.max()))
    with output(path, inputs) as file:
        np.savez_compressed(file, counts=trace.counts.astype(kind), iteration=trace.iteration, layer=trace.layer)


def read_reported_loads(report: History | str | PathLike[str]) -> LoadTrace:
    """The loads of a recorded run: one record for each observed iteration.

    report: the result of `read_history`, or the directory of --balance-report.

    A report has no loads by micro-batch or source rank. A record is therefore the mean micro-batch, spread equally over
    the expert-parallel ranks. Raises ValueError, one line, if the directory has no run or a run without experts.
    """
    history = report if isinstance(report, History) else read_history(report)
    directory = history.directory
    layers = sorted({layer for own in history.experts.values() for layer in own})
    whole = [iteration for iteration in sorted(history.experts) if sorted(history.experts[iteration]) == layers]
    if not layers:
        raise history.lacks("experts", "rank", f"{directory} has no experts; train an MoE model with --balance-report")
    if not whole:
        raise history.lacks("experts", "rank", f"{directory} has no iteration with the loads of all its MoE layers")
    lines = [[history.experts[iteration][layer] for layer in layers] for iteration in whole]
    sizes = {(len(line["tokens_per_expert"]), len(line["tokens_per_rank"])) for own in lines for line in own}
    if len(sizes) > 1:
        raise ValueError(f"{directory} has layers with different numbers of experts or ranks: {sorted(sizes)}")
    ranks = sizes.pop()[1]
    batches = [
        max(history.stages[iteration]["micro_batches"], 1) if iteration in history.stages else 1 for iteration in whole
    ]
    tokens = np.array([[line["tokens_per_expert"] for line in own] for own in lines], dtype=np.int64)
    tokens //= np.array(batches)[:, None, None]
    trace = LoadTrace(tokens[:, None, :, None], np.array(whole), np.array(layers))
    return replace(trace, counts=trace.on_ranks(ranks))

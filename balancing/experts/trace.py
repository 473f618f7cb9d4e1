"""Recorded loads, with which planners are compared: a compact .npz file, or the routing trace of Megatron-LM.

Megatron-LM's `--moe-routing-trace-path DIR` writes one file a rank, router_trace_rank<R>.jsonl, with one line for each
call of a router: step, block, layer, rank, and the experts chosen for each token. A line does not name its micro-batch,
and under activation recomputation routers run, and write, twice. Both follow from the order of lines: a layer processes
micro-batches in order, and a recomputation repeats the choices of the first run. Traces for which that does not hold
are rejected: those with evaluation between steps, and those of interleaved pipelines, whose chunks share layer numbers.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from balancing.files import output, parse_json, read_arrays
from balancing.report import History, read_history

__all__ = ["LoadTrace", "read_load_trace", "read_reported_loads", "read_routing_trace", "write_load_trace"]

_COUNTS = ("record", "source_rank", "layer", "micro_batch", "expert")


@dataclass(frozen=True)
class LoadTrace:
    """Loads of a recorded run.

    counts: int [record, source_rank, layer, micro_batch, expert], tokens.
    iteration: int [record], the training iteration of each record.
    layer: int [layer], number of each layer in the model.

    Raises ValueError where shapes disagree or counts are negative.
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
        for name, axis in (("iteration", 0), ("layer", 2)):
            if getattr(self, name).shape != (self.counts.shape[axis],):
                raise ValueError(f"{name} has shape {getattr(self, name).shape} for {self.counts.shape[axis]} {name}s")

    def on_ranks(self, ranks: int) -> np.ndarray:
        """Counts for another number of ranks: int64 [record, rank, layer, micro_batch, expert].

        Neighbouring source ranks are merged, or each is split into equal parts. Raises ValueError if neither number is
        a multiple of the other.
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
    """Write a file for `read_load_trace`, with counts in the smallest type that holds them.

    inputs: files that are read. Raises ValueError if the file cannot be written, as `balancing.files.output` does.
    """
    kind = np.min_scalar_type(int(trace.counts.max()))
    with output(path, inputs) as file:
        np.savez_compressed(file, counts=trace.counts.astype(kind), iteration=trace.iteration, layer=trace.layer)


def read_routing_trace(
    directory: str | PathLike[str], *, experts: int, micro_batches: int, stages: int = 1
) -> LoadTrace:
    """Read the directory that `--moe-routing-trace-path` named. Only decoder layers are read.

    directory: has one file a rank.
    experts: number of experts of a layer; the files name only those that were chosen.
    micro_batches: number of micro-batches of an iteration on each rank: global batch size / (micro batch size x
        data-parallel size).
    stages: number of pipeline stages, each of which numbers its layers from 0. Ranks are assumed to fill stages in
        order; layers get consecutive numbers.

    The source ranks of a layer are all ranks of its stage; with several expert-parallel groups, select the ranks of one
    from `counts`. Iterations that are missing in some file are left out. Raises ValueError, one line that names the
    file, for files that are missing, truncated, inconsistent, or cannot be divided into micro-batches.
    """
    directory = Path(directory)
    for name, value in (("experts", experts), ("micro_batches", micro_batches), ("stages", stages)):
        if value < 1:
            raise ValueError(f"{name}={value} must be at least 1")
    paths = _rank_files(directory)
    if len(paths) % stages:
        raise ValueError(f"routing trace {directory}: {len(paths)} ranks do not divide into {stages} stages")
    loads = [_read_rank(path, experts, micro_batches) for path in paths]
    steps = sorted(set.intersection(*({step for step, _ in load} for load in loads)))
    if not steps:
        raise ValueError(f"routing trace {directory} has no step that is in the files of all {len(paths)} ranks")
    per_stage, columns = len(paths) // stages, []
    names: list[int] = []
    for stage in range(stages):
        of_stage = loads[stage * per_stage : (stage + 1) * per_stage]
        layers = sorted({layer for load in of_stage for _, layer in load})
        for layer in layers:
            try:
                columns.append(np.array([[load[step, layer] for load in of_stage] for step in steps]))
            except KeyError as error:
                raise ValueError(
                    f"routing trace {directory}: no record of layer {layer} in step {error.args[0][0]} on some rank of "
                    f"stage {stage}; with several pipeline stages pass their number"
                ) from None
        first = names[-1] + 1 if stage else 0
        names += [first + layer for layer in layers]
    return LoadTrace(np.stack(columns, axis=2), np.array(steps), np.array(names))


def read_reported_loads(report: History | str | PathLike[str]) -> LoadTrace:
    """The loads of a recorded run: one record for each observed iteration.

    report: what `read_history` read, or the directory of --balance-report.

    A report has neither micro-batches nor source ranks: a record is the mean micro-batch, spread equally over the
    expert-parallel ranks. Raises ValueError, one line, if the directory has no run or a run without experts.
    """
    history = report if isinstance(report, History) else read_history(report)
    directory = history.directory
    layers = sorted({layer for own in history.experts.values() for layer in own})
    whole = [iteration for iteration in sorted(history.experts) if sorted(history.experts[iteration]) == layers]
    if not layers:
        raise history.lacks(
            "experts", "rank", f"{directory} tells of no experts; train a model that has some with --balance-report"
        )
    if not whole:
        raise history.lacks("experts", "rank", f"{directory} has no iteration in which all of its MoE layers are told")
    lines = [[history.experts[iteration][layer] for layer in layers] for iteration in whole]
    sizes = {(len(line["tokens_per_expert"]), len(line["tokens_per_rank"])) for own in lines for line in own}
    if len(sizes) > 1:
        raise ValueError(f"{directory} has layers with different numbers of experts or ranks: {sorted(sizes)}")
    ranks = sizes.pop()[1]
    batches = [max(history.stages[at]["micro_batches"], 1) if at in history.stages else 1 for at in whole]
    tokens = np.array([[line["tokens_per_expert"] for line in own] for own in lines], dtype=np.int64)
    tokens //= np.array(batches)[:, None, None]
    trace = LoadTrace(tokens[:, None, :, None], np.array(whole), np.array(layers))
    return replace(trace, counts=trace.on_ranks(ranks))


def _rank_files(directory: Path) -> list[Path]:
    """The files of ranks 0, 1, 2 and so on, in this order."""
    numbered = {}
    for path in directory.glob("router_trace_rank*.jsonl"):
        if match := re.fullmatch(r"router_trace_rank(\d+)\.jsonl", path.name):
            numbered[int(match[1])] = path
    if not numbered:
        raise ValueError(f"no router_trace_rank<R>.jsonl in {directory}; give the folder of --moe-routing-trace-path")
    if missing := sorted(set(range(max(numbered) + 1)) - set(numbered)):
        raise ValueError(f"routing trace {directory} has no file of rank {missing[0]}, but one of rank {max(numbered)}")
    return [numbered[rank] for rank in sorted(numbered)]


def _read_rank(path: Path, experts: int, micro_batches: int) -> dict[tuple[int, int], np.ndarray]:
    """Loads of one rank: (step, layer) -> int64 [micro_batch, expert]."""
    runs: dict[tuple[int, int], list[tuple[int, np.ndarray]]] = {}
    for number, record in _lines(path):
        try:
            if record.get("block", "decoder") != "decoder":
                continue
            at = int(record["step"]), int(record["layer"])
            chosen = np.asarray(record["top_indices"], dtype=np.int64)
            tokens, width = int(record["num_tokens"]), int(record["topk"])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(f"{path}:{number} is not a record of a router: {error!r}") from error
        if chosen.shape != (tokens, width) and not (tokens == 0 and chosen.size == 0):
            raise ValueError(f"{path}:{number} has choices of shape {chosen.shape} for {tokens} tokens and top-{width}")
        if chosen.size and not 0 <= chosen.min() <= chosen.max() < experts:
            wrong = chosen.max() if chosen.max() >= experts else chosen.min()
            raise ValueError(f"{path}:{number} names expert {wrong}, but experts={experts}")
        load = np.bincount(chosen.reshape(-1), minlength=experts)
        runs.setdefault(at, []).append((hash(chosen.tobytes()), load))
    if not runs:
        raise ValueError(f"{path} has no record of a decoder layer")
    return {at: _by_micro_batch(path, at, run, micro_batches) for at, run in runs.items()}


def _lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Number, from 1, and object of each line."""
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            try:
                yield number, parse_json(line)
            except ValueError as error:
                cut = "is cut short" if not line.endswith("\n") else "is not JSON"
                raise ValueError(f"{path}:{number} {cut}: {error}") from error


def _by_micro_batch(
    path: Path, at: tuple[int, int], run: list[tuple[int, np.ndarray]], micro_batches: int
) -> np.ndarray:
    """Loads of one step and layer, int64 [micro_batch, expert], from one run each or, recomputed, from two."""
    if len(run) == micro_batches:
        return np.array([load for _, load in run])
    if len(run) == 2 * micro_batches:
        runs, seen, originals = Counter(choices for choices, _ in run), Counter[int](), []
        for choices, load in run:
            seen[choices] += 1
            if 2 * seen[choices] <= runs[choices]:  # equal micro-batches: any half of them
                originals.append(load)
        if all(number % 2 == 0 for number in runs.values()):
            return np.array(originals)
    step, layer = at
    raise ValueError(
        f"{path}: layer {layer} ran {len(run)} times in step {step}, neither {micro_batches} micro-batches nor these "
        "recomputed; check micro_batches, and record without evaluation and without an interleaved pipeline"
    )

"""What a layer's attention asks of the host and of the device: launches, merges, messages, bytes copied, host time.

    python -m benchmarks.sequences.launches [--quick] [--lengths FILE] [--ranks N ...] [--window N] [--json FILE]

Batches of documents as in `benchmarks.sequences.plans`: 4k tokens a rank, as long as those of published training sets
or recorded; an 8B model with grouped queries on H200 nodes. The engine itself runs, forward and backward, on tensors
without data, with messages that are not sent and a kernel that computes nothing, so everything is counted on a CPU:

- calls: of attention, each one launch of flash attention on a GPU; rounds: transfers that bring the rank keys.
- merges: of partial results, forward.
- launches: attention, merges, sums of gradients and every other operation on tensors that writes memory (copies,
  conversions).
- messages that the rank sends.
- bytes written by what is not attention. Keys and values that travel are not among them.
- host microseconds: processor time of the engine's Python and of torch's dispatch of operations on one number a token,
  without a driver's or Triton's time for a launch; the quickest of several runs.

Then modelled seconds of a step on H100 and H200 nodes (`balancing.sequences.cost`), planned by chunks, over what they
would be if launches, messages and the host cost nothing.

With --window counts are of layers with a sliding window, modelled seconds those of a model whose layers all have it.

Counts are of the rank with the most, the mean over the batches; in parentheses the largest. "Transformer Engine" is
its ring: a call and a correction a round (its fused attention and `thd_out_correction`), not run here. Nothing is
trained. Takes about 5 minutes on one core, with --quick one. Exit code 1 if a row misses its target: calls at most
rounds + 2, merges at most rounds.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, get_args

import numpy as np
import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch.utils._python_dispatch import TorchDispatchMode

from balancing.cluster import Cluster
from balancing.files import write_text
from balancing.sequences import AttentionShape, SequencePlan, Statistics, compile_rank, plan_sequences, step_cost
from balancing.sequences.engine import attention
from balancing.sequences.engine.attention_call import AttentionCall
from balancing.sequences.engine.call_rows import rows_on_device
from balancing.sequences.engine.program import Wait
from balancing.sequences.engine.rank_program import RankProgram, TokenBytes
from balancing.sequences.engine.transport import Transport
from balancing.sequences.plan import Method
from balancing.sequences.window import in_window
from benchmarks.processor_time import milliseconds
from benchmarks.sequences.lengths import draw_batch
from benchmarks.sequences.plans import sources

__all__ = ["Counted", "Row", "count", "launches"]

_TOKENS = 4096  # a rank
_SHAPE = AttentionShape(4096, 32, 4, 32, 14336)
_PRESETS = _, _PRESET = "h100-8x400g", "h200-8x400g"
_MOST_RANKS = 8  # of a plan, evenly spaced, that are looked at
_TRANSFORMER_ENGINE = "Transformer Engine's ring"


@dataclass
class Counted:
    """Counts of one direction of one layer on one rank; microseconds of processor time."""

    calls: int = 0
    merges: int = 0
    launches: int = 0
    messages: int = 0
    bytes: int = 0
    microseconds: float = 0.0


@dataclass(frozen=True)
class Row:
    """One figure of a planner at a number of ranks; or of lengths, in `method`, on a preset, in `direction`.

    figure, most: mean and largest over the batches, of the rank with the most.
    rounds: mean number of transfers that bring this rank keys, forward.
    met: whether every batch kept to the target; None where there is none.
    """

    ranks: int
    method: str
    direction: str
    what: str
    figure: float
    most: float
    rounds: float
    met: bool | None = None


class _Writes(TorchDispatchMode):
    """Counts operations that write memory, and the bytes."""

    def __init__(self, counted: Counted) -> None:
        super().__init__()
        self._counted = counted

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if not (func.is_view or name.startswith(("empty", "new_empty", "detach", "_unsafe_view"))):
            outputs = result if isinstance(result, (tuple, list)) else (result,)
            if name.startswith(("index_add", "index_put", "index_copy")):  # in place, in some rows
                outputs = [x for x in args if isinstance(x, torch.Tensor)][-1:]
            self._counted.launches += 1
            self._counted.bytes += sum(x.numel() * x.itemsize for x in outputs if isinstance(x, torch.Tensor))
        return result


class _Unsent(Transport):
    """Packs messages and counts them; sends none."""

    def __init__(self, rank: int, counted: Counted) -> None:
        self.rank, self.counted = rank, counted

    def _operation(self, kind: Any, tensor: torch.Tensor, peer: int, tag: int) -> Any:
        self.counted.messages += kind is torch.distributed.isend
        return None

    def _on_host(self, *unused: Any) -> None:
        pass


class _Unlaunched:
    """A kernel that counts calls and computes nothing."""

    def __init__(self, counted: Counted) -> None:
        self.counted = counted

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, pieces: Any, scale: float) -> Any:
        self.counted.calls += 1
        self.counted.launches += 1
        return torch.empty_like(q), q.new_empty(q.shape[1], q.shape[0], dtype=torch.float32)

    def backward(self, grad: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *unused: Any) -> Any:
        self.counted.calls += 1
        self.counted.launches += 1
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


@contextmanager
def _counted_kernels(counted: Counted) -> Iterator[None]:
    def merge(out: torch.Tensor, logsumexp: torch.Tensor, more_out: torch.Tensor, *unused: Any) -> None:
        counted.merges += 1
        counted.launches += 1
        counted.bytes += more_out.numel() * out.itemsize

    def add(total: torch.Tensor, rows: Any, parts: tuple[torch.Tensor, ...], which: Any = None) -> None:
        tokens = len(rows) if isinstance(rows, torch.Tensor) else rows.stop - rows.start
        counted.launches += 1
        counted.bytes += tokens * sum(part.shape[1:].numel() for part in parts) * total.itemsize

    originals = attention.choose_merge, attention.choose_add
    attention.choose_merge, attention.choose_add = lambda device: merge, lambda device: add
    try:
        yield
    finally:
        attention.choose_merge, attention.choose_add = originals


def count(plan: SequencePlan, program: RankProgram, shape: AttentionShape, repeats: int) -> tuple[Counted, Counted]:
    """Counts of one layer, forward and backward, of the rank whose program it is. repeats: of which time is taken."""
    forward, backward = Counted(), Counted()
    rows_of = {
        device: rows_on_device(program.program.calls, program.table, torch.device(device))[0]
        for device in ("cpu", "meta")
    }

    def run(counted: Counted, heads: int, kv_heads: int, size: int, device: str) -> tuple[Any, ...]:
        transport, kernel = _Unsent(program.rank, counted), _Unlaunched(counted)
        call = AttentionCall(program, transport, Statistics(), kernel, 1.0, rows_of[device])
        tokens = int(plan.linear_tokens[program.rank])
        inputs = [
            torch.empty(tokens, number, size, dtype=torch.bfloat16, device=device, requires_grad=True)
            for number in (heads, kv_heads, kv_heads)
        ]
        out = attention._Attention.apply(*inputs, None, None, None, call)
        return out, inputs, torch.empty_like(out), call

    with _counted_kernels(forward), _Writes(forward):
        out, inputs, grad, call = run(forward, shape.heads, shape.kv_heads, shape.head_size, "meta")
    call.transport.counted = call.kernel.counted = backward
    with _counted_kernels(backward), _Writes(backward):
        torch.autograd.grad(out, inputs, grad)
    # Operations on one number a token take little longer than their dispatch.
    small = partial(run, Counted(), 1, 1, 1, "cpu")
    out, inputs, grad, _ = small()
    again = partial(torch.autograd.grad, out, inputs, grad, retain_graph=True)
    with _counted_kernels(Counted()):
        forward.microseconds, backward.microseconds = (milliseconds(one, repeats) * 1e3 for one in (small, again))
    return forward, backward


def rounds_of(program: RankProgram) -> int:
    """Transfers that bring the rank keys and values, forward."""
    one = program.program
    return sum(isinstance(step, Wait) and bool(one.messages[step.group].receives) for step in one.forward)


def launches(
    known: dict[str, str | np.ndarray],
    sizes: Sequence[int],
    batches: int,
    repeats: int,
    progress: Progress,
    shape: AttentionShape = _SHAPE,
) -> list[Row]:
    """Rows of all planners at all numbers of ranks, with those of Transformer Engine's ring. shape: of the model; if it
    has layers with a window, these are counted."""
    rows: list[Row] = []
    token_bytes = TokenBytes.of(heads=_SHAPE.heads, kv_heads=_SHAPE.kv_heads, head_size=_SHAPE.head_size, item_bytes=2)
    cells = [(ranks, method) for ranks in sizes for method in get_args(Method)]
    for ranks, method in progress.track(cells, description="launches"):
        cluster = _cluster(_PRESET, ranks)
        found: list[tuple[int, Counted, Counted]] = []  # of each batch, of its rank with the most launches
        for source in known.values():
            for batch in range(batches):
                lengths = draw_batch(source, _TOKENS * ranks, np.random.default_rng(batch))
                plan = plan_sequences(lengths, cluster, shape=shape, method=method)
                if shape.window is not None:
                    plan = in_window(plan, shape.window)
                every = max(1, ranks // _MOST_RANKS)
                programs = [compile_rank(plan, rank, cluster, "off", token_bytes) for rank in range(0, ranks, every)]
                most = max(programs, key=lambda one: len(one.program.forward))
                found.append((rounds_of(most), *count(plan, most, shape, repeats)))
        rows += _rows(ranks, method, found)
        if method == get_args(Method)[-1]:
            ring = Counted(ranks, ranks - 1, 2 * ranks - 1, ranks - 1)
            rows += [
                Row(ranks, _TRANSFORMER_ENGINE, "forward", what, getattr(ring, what), getattr(ring, what), ranks - 1)
                for what in ("calls", "merges", "launches", "messages")
            ]
    return rows


def modelled(
    known: dict[str, str | np.ndarray], sizes: Sequence[int], batches: int, shape: AttentionShape = _SHAPE
) -> list[Row]:
    """Modelled time with latencies over that without."""
    rows = []
    for preset in _PRESETS:
        for ranks in sizes:
            cluster = _cluster(preset, ranks)
            free = replace(cluster, launch_seconds=0.0, message_seconds=0.0, host_seconds=0.0)
            for name, source in known.items():
                found = []
                for batch in range(batches):
                    lengths = draw_batch(source, _TOKENS * ranks, np.random.default_rng(batch))
                    plan = plan_sequences(lengths, cluster, shape=shape)
                    with_latencies, without = (step_cost(plan, one, shape).total for one in (cluster, free))
                    found.append(with_latencies / without)
                rows.append(Row(ranks, name, preset, "chunks", float(np.mean(found)), max(found), 0.0))
    return rows


def _cluster(preset: str, ranks: int) -> Cluster:
    return Cluster.sheet(preset).relabel(max(1, ranks // 8), min(8, ranks))


def _rows(ranks: int, method: str, found: list[tuple[int, Counted, Counted]]) -> Iterator[Row]:
    rounds = float(np.mean([one for one, _, _ in found])) if found else 0.0
    for at, direction in ((1, "forward"), (2, "backward")) if found else ():
        for what in ("calls", "merges", "launches", "messages", "bytes", "microseconds"):
            figures = [getattr(one[at], what) for one in found]
            met = None
            if direction == "forward" and what in ("calls", "merges"):
                most = [one[0] + 2 * (what == "calls") for one in found]
                met = all(figure <= bound for figure, bound in zip(figures, most, strict=True))
            if direction == "forward" or what != "merges":
                yield Row(ranks, method, direction, what, float(np.mean(figures)), float(max(figures)), rounds, met)


def _show(rows: Sequence[Row], console: Console) -> None:
    """A table a direction: a line a planner and number of ranks, the mean and in parentheses the most."""
    scales = {"bytes": (1e6, "MB copied"), "microseconds": (1.0, "host us")}
    for direction in ("forward", "backward"):
        own = [row for row in rows if row.direction == direction]
        names = list(dict.fromkeys(row.what for row in own))
        table = Table(title=f"{direction}, a layer", title_justify="left", box=None, pad_edge=False)
        for head in ("ranks", "planner", "rounds", *(scales.get(name, (1, name))[1] for name in names), "target"):
            table.add_column(head, justify="left" if head in ("planner", "target") else "right", no_wrap=True)
        for ranks, method in dict.fromkeys((row.ranks, row.method) for row in own):
            line = {row.what: row for row in own if (row.ranks, row.method) == (ranks, method)}
            cells = []
            for name in names:
                scale = scales.get(name, (1.0, ""))[0]
                row = line.get(name)
                cells.append("" if row is None else f"{row.figure / scale:.0f} ({row.most / scale:.0f})")
            missed = [row.what for row in line.values() if row.met is False]
            verdict = f"{', '.join(missed)} MISSED" if missed else "met" if line["calls"].met else ""
            table.add_row(str(ranks), method, f"{line['calls'].rounds:.0f}", *cells, verdict)
        console.print(table, "")
    for preset in _PRESETS:
        own = [row for row in rows if row.direction == preset]
        table = Table(title=f"modelled seconds over those without latencies, {preset}", title_justify="left", box=None)
        for head in ("ranks", "lengths", "chunks"):
            table.add_column(head, justify="left" if head == "lengths" else "right", no_wrap=True)
        for row in own:
            table.add_row(str(row.ranks), row.method, f"{row.figure:.3f} ({row.most:.3f})")
        console.print(table, "")


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code: 1 if a target was missed, 2 for bad input."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.sequences.launches", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--quick", action="store_true", help="one batch of each distribution, 8 and 16 ranks")
    parser.add_argument("--lengths", metavar="FILE", help="recorded lengths: .npz, or text with one per line")
    parser.add_argument("--ranks", type=int, nargs="+", metavar="N", help="numbers of ranks (default 8 16 64)")
    parser.add_argument("--window", type=int, metavar="N", help="previous tokens that a token attends to (default all)")
    parser.add_argument("--json", metavar="FILE", help="write the rows to FILE")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    try:
        known = sources(options.lengths)
        sizes = options.ranks or ((8, 16) if options.quick else (8, 16, 64))
        if wrong := [ranks for ranks in sizes if ranks < 2 or (ranks > 8 and ranks % 8)]:
            raise ValueError(f"--ranks {wrong[0]} does not fill nodes of 8 ranks; give multiples of 8, or 2 to 8")
        windowed = 0 if options.window is None else _SHAPE.layers
        shape = replace(_SHAPE, window=options.window, windowed_layers=windowed)
        with Progress(console=Console(stderr=True), transient=True) as progress:
            rows = launches(known, sizes, 1 if options.quick else 2, 5, progress, shape)
            rows += modelled(known, sizes, 1 if options.quick else 4, shape)
        if options.json:
            write_text(options.json, json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    except (ValueError, OSError) as error:
        print(f"launches: {error}", file=sys.stderr)
        return 2
    _show(rows, Console(width=max(160, Console().width)))
    return 1 if any(row.met is False for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())

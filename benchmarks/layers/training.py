"""Speedup of real training by layer balancing, on two pipeline stages, each a process pinned to its own core.

    python -m benchmarks.layers.training [--quick] [--cases NAME ...] [--json FILE]

A GPT of 12 layers trains on real text (the source of Python's standard library), and after some steps becomes uneven:

- freezing: the first six layers are frozen, all of the first stage.
- early exit: about a third of the tokens exit after the first layer, and nearly all others after the sixth.

The same steps run alternately with Megatron's six layers a stage and with `--balance-layers`, each run in a new pair of
processes. Real compute, real transfers and real moves; nothing is emulated. The speedup is that of median
steps after the move, the median over pairs of runs. The bound is the gain of the best partition in simulated 1F1B with
the CPU seconds of the run that never moves. On a shared machine, other processes slow down balanced stages most, since
neither of them waits; so the quickest step is given beside the median. Losses of both runs must agree; clipping is off,
since its norm is summed stage by stage. Exit code 1 if they do not agree, or if layers did not move.
"""

import statistics
import sys
import tempfile
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # type: ignore[import-untyped]

from balancing.layers import LayerSeconds, StagePlan
from balancing.report import read_history
from benchmarks.command import load_before, parser, show_rows, write_rows
from benchmarks.pinned import DYNAMIC, SMALL, prepare_corpus, step_milliseconds
from benchmarks.settings import scheme_flags

__all__ = ["ROUNDS", "bound", "measure"]

_LAYERS, _MICRO_BATCHES = 12, 8
ROUNDS = 12, 4  # steps after the move, and runs of each kind
_CHANGE, _INTERVAL = 4, 4  # steps before the model changes, and between decisions about layers
_MOVED = _CHANGE + _INTERVAL  # steps when layers have moved
MODEL = (
    f"{SMALL} "
    f"--num-layers {_LAYERS} --hidden-size 256 --ffn-hidden-size 1024 --num-attention-heads 4 --seq-length 192 "
    "--max-position-embeddings 192 --normalization RMSNorm --disable-bias-linear "
    "--untie-embeddings-and-output-weights --pipeline-model-parallel-size 2 --micro-batch-size 1 "
    "--train-iters 1000 "  # of which the first are run, so that the gate has something to gain
    f"--global-batch-size {_MICRO_BATCHES} --lr 1e-3 --clip-grad 0 --log-interval 1 --tensorboard-log-interval 1 "
    "--num-workers 0"
).split()
CASES = {
    "freezing": f"--freeze-layers 6 --freeze-layers-start {_CHANGE}",
    "early exit": scheme_flags(early_exit_layers=[1, 6], early_exit_threshold=0.2, early_exit_start=_CHANGE),
}
_BALANCE = f"--balance-layers --layer-balance-interval {_INTERVAL}".split()


def _losses(folder: Path) -> list[float]:
    """Of every step, as exact as they were computed: the log has seven digits."""
    events = EventAccumulator(str(folder))
    events.Reload()
    return [each.value for each in events.Scalars("lm loss")]


def _costs(report: Path) -> LayerSeconds:
    """Medians over the iterations of a run after its model has changed."""
    lines = [line for at, line in read_history(report).layers.items() if at > _CHANGE + 1]
    forward, backward = (np.median([line[name] for line in lines], axis=0) for name in ("forward_s", "backward_s"))
    at = {name: number for number, name in enumerate(lines[0]["layers"])}
    layers = [at[number] for number in range(_LAYERS)]
    ends = [(float(forward[at[end]]), float(backward[at[end]])) for end in ("embedding", "head")]
    return LayerSeconds(forward[layers], backward[layers], *ends)


def bound(cost: LayerSeconds, micro_batches: int) -> tuple[float, int]:
    """The largest speedup over equal halves that a cut between two layers gives, and the layers before that cut."""
    seconds = {
        first: cost.simulate(StagePlan.from_counts(((first,), (cost.layers - first,))), micro_batches).step_time
        for first in range(1, cost.layers)
    }
    best = min(seconds, key=lambda first: seconds[first])
    return seconds[cost.layers // 2] / seconds[best], best


def _moves(report: Path) -> list[dict[str, Any]]:
    return [
        line
        for line in read_history(report).actions
        if line["balancer"] == "layers" and line["action"] in ("move", "rollback")
    ]


def measure(case: str, steps: int, rounds: int) -> tuple[list[dict[str, Any]], list[str]]:
    """Rows of the table for a case, and what is wrong with them. steps: after the move; rounds: runs of each kind."""
    phases = {"before": slice(1, _CHANGE), "changed": slice(_CHANGE + 1, _MOVED), "moved": slice(_MOVED + 1, None)}
    found: dict[str, dict[str, list[list[float]]]] = {
        kind: {name: [] for name in phases} for kind in ("static", "balanced")
    }
    losses: dict[str, list[list[float]]] = {kind: [] for kind in found}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = [*MODEL, *prepare_corpus(folder), *CASES[case].split(), "--exit-interval", str(_MOVED + steps)]
        for number in range(rounds):
            for kind, phase in found.items():
                own = folder / f"{kind} {number}"
                flags = ["--balance-report", str(own / "report"), "--tensorboard-dir", str(own / "tensorboard")]
                times = step_milliseconds([*model, *flags, *(_BALANCE if kind == "balanced" else [])], DYNAMIC)
                for when, steps_of in phases.items():
                    phase[when].append(times[steps_of])
                losses[kind].append(_losses(own / "tensorboard"))
                text = ", ".join(f"{when} {statistics.median(phase[when][-1]):.0f} ms" for when in phases)
                print(f"{case}, round {number + 1} of {rounds}, {kind}: {text}", file=sys.stderr, flush=True)
        last = rounds - 1
        speedup, first = bound(_costs(folder / f"static {last}" / "report"), _MICRO_BATCHES)
        moves = [_moves(folder / f"balanced {number}" / "report") for number in range(rounds)]
    each = [each for of_kind in losses.values() for each in of_kind]
    apart = max(abs(a / b - 1) for one in each for a, b in zip(one, each[0], strict=True))
    wrong = [] if apart <= 1e-6 else [f"{case}: losses differ by {apart:.1e}"]
    wrong += [f"{case}: layers did not move" for own in moves if not own]
    median = {
        kind: {when: statistics.median(chain.from_iterable(runs)) for when, runs in times.items()}
        for kind, times in found.items()
    }
    rows = []
    for kind, of in median.items():
        pairs = zip(found["static"]["moved"], found[kind]["moved"], strict=True)  # one after the other
        ratio = statistics.median(statistics.median(without) / statistics.median(own) for without, own in pairs)
        quickest = min(map(min, found[kind]["moved"]))
        rows.append(
            {
                "case": case,
                "method": kind,
                **{f"{when}_ms": value for when, value in of.items()},
                "quickest_ms": quickest,
                "quickest_speedup": min(map(min, found["static"]["moved"])) / quickest,
                "speedup": ratio,
                "ratio_to_baseline": 1 / ratio,
                "bound": speedup,
                "ratio_to_limit": speedup / ratio,
                "layers": first if kind == "static" else [line["layout_after"] for m in moves for line in m],
                "move_ms": max((line["apply_ms"] for m in moves for line in m if kind != "static"), default=None),
                "loss_difference": apart,
                "loss": each[0][-1],
                "steps": sum(map(len, found[kind]["moved"])),
            }
        )
    return rows, wrong


def main() -> int:
    options_of = parser("layers.training", __doc__, "freezing alone, fewer steps, noisier figures")
    options_of.add_argument("--cases", nargs="+", choices=[*CASES], metavar="NAME", help="only these")
    options = options_of.parse_args()
    load = load_before()
    rows, wrong = [], []
    for case in options.cases or [case for case in CASES if not options.quick or case == "freezing"]:
        own, complaints = measure(case, *((5, 1) if options.quick else ROUNDS))
        rows += own
        wrong += complaints
    print(f"{load}; seconds of a step, medians")
    print(f"layers may move every {_INTERVAL} steps\n")
    show_rows("case; method; before, ms=before_ms:.0f; changed, ms=changed_ms:.0f; moved, ms=moved_ms:.0f; "
              "quickest, ms=quickest_ms:.0f; speedup=speedup:.3f; by quickest=quickest_speedup:.3f; bound=bound:.3f; "
              "move, ms=move_ms:.0f; losses apart=loss_difference:.1e; steps", rows)  # fmt: skip
    for complaint in wrong:
        print(f"layers_training: {complaint}", file=sys.stderr)
    write_rows(options.json, rows, load=load)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

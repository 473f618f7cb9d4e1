"""Step time of real training with and without balanced sequences: two processes, each pinned to its own core.

    python -m benchmarks.sequences.training [--quick] [--json FILE]

A GPT with context parallelism 2 trains on documents of real, heavy-tailed length (the source of Python's standard
library, a token a byte), each attending to itself, with `--balance-sequences`. The same steps run with the planner
ring, which cuts every document over both ranks as Transformer Engine does, and with chunks, alternately, each run in a
new pair of processes. Compute and transfers are real; nothing is emulated. The limit is the step without the time that
the rank that waits longest waits for transfers. Plan wait: how long a step waits for plans. The data loader's worker
makes them ahead, on the same core.
"""

import statistics
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.command import parser, show_rows, write_rows
from benchmarks.pinned import SMALL, prepare_corpus, read_events, step_milliseconds
from benchmarks.settings import settings

MODEL = (
    f"{SMALL} "
    "--num-layers 2 --hidden-size 128 --ffn-hidden-size 256 --num-attention-heads 4 --seq-length 4096 "
    "--max-position-embeddings 4096 --normalization RMSNorm --swiglu --disable-bias-linear "
    "--context-parallel-size 2 --balance-sequences --dataloader-inter-document-masking --micro-batch-size 2 "
    "--global-batch-size 4 --lr 1e-3 --log-interval 1 --num-workers 1"
).split()
_BASELINE = "ring"
_WARM_UP = 2  # steps


def _events(report: Path) -> list[dict[str, Any]]:
    """Those of the balancer of sequences, after the first steps."""
    return [line for line in read_events(report) if line["action"] == "spread" and line["iteration"] > _WARM_UP]


def measure(steps: int, rounds: int) -> list[dict[str, Any]]:
    """Rows of the table. steps: of each run. rounds: runs of each planner."""
    times: dict[str, list[float]] = {_BASELINE: [], "chunks": []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = [*MODEL, *prepare_corpus(folder), "--train-iters", str(_WARM_UP + steps)]
        for number in range(rounds):
            for planner, own in times.items():
                report = ["--balance-report", str(folder / planner)]
                own += step_milliseconds([*model, *settings("sequences", planner=planner).split(), *report])[_WARM_UP:]
                middle = statistics.median(own)
                print(f"round {number + 1} of {rounds}, {planner}: {middle:.1f} ms", flush=True)
        events = {planner: _events(folder / planner) for planner in times}
    median = {planner: statistics.median(own) for planner, own in times.items()}
    rows = []
    for planner, own in times.items():
        exposed = statistics.median(event["apply_ms"] for event in events[planner])
        rows.append(
            {
                "method": planner,
                "step_ms": median[planner],
                "ratio_to_baseline": median[planner] / median[_BASELINE],
                "ratio_to_limit": median[planner] / (median[planner] - exposed),
                "exposed_ms": exposed,
                "plan_wait_ms": statistics.median(event["plan_wait_ms"] for event in events[planner]),
                "area_imbalance": statistics.mean(event["imbalance_after"] for event in events[planner]),
                "sent_bytes": statistics.mean(event["moved_bytes"] for event in events[planner]),
                "steps": len(own),
            }
        )
    return rows


def main() -> None:
    options = parser("sequences.training", __doc__, "fewer steps, noisier figures").parse_args()
    rows = measure(4, 1) if options.quick else measure(12, 3)
    show_rows("method; step, ms=step_ms:.1f; / ring=ratio_to_baseline:.3f; / limit=ratio_to_limit:.3f; exposed="
              "exposed_ms:.1f; plan wait=plan_wait_ms:.1f; max/mean=area_imbalance:.3f; bytes=sent_bytes:,.0f; steps",
              rows)  # fmt: skip
    write_rows(options.json, rows)


if __name__ == "__main__":
    main()

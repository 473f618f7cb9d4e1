"""Cost of observation: the share of a step that `--balance-report` takes.

    python -m benchmarks.observation [--quick] [--json FILE]

One training run on four gloo ranks (pipeline parallel 2, expert parallel 2) observes every second step. Each observed
step is compared with the next one, which is not observed, so that drift of the machine's speed cancels. CPU time is
that of the ranks' training threads alone, so other processes do not disturb it. Target: at most 1 %.
"""

import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.command import parser, show_rows, write_rows
from benchmarks.pinned import run_ranks
from benchmarks.replaced import replace_name

RANKS = 4
MODEL = (
    "--device cpu --num-layers 8 --hidden-size 192 --num-attention-heads 4 --seq-length 256 "
    "--max-position-embeddings 256 --position-embedding-type rope --swiglu --disable-bias-linear --num-experts 8 "
    "--moe-router-topk 2 --moe-ffn-hidden-size 192 --moe-token-dispatcher-type alltoall "
    "--pipeline-model-parallel-size 2 --expert-model-parallel-size 2 --micro-batch-size 1 --global-batch-size 16 "
    "--lr 1e-3 --eval-interval 100000 --eval-iters 0 --log-interval 10 --num-workers 0 --mock-data "
    "--tokenizer-type NullTokenizer --vocab-size 255 --distributed-timeout-minutes 5"
).split()


def _train(steps: int, report: str, figures: Path) -> None:
    """One rank: train with the observer asleep in every second step, and keep the times of all steps."""
    from megatron.balanced.trainer.arguments import parse_arguments

    args, config = parse_arguments([*MODEL, "--train-iters", str(steps), "--balance-report", report])

    from megatron.training import training

    from megatron.balanced.observe import observer
    from megatron.balanced.trainer import train

    times: list[tuple[int, float, float]] = []  # iteration, wall-clock and CPU seconds
    begin_step, end_step = observer.Observer.begin_step, observer.Observer.end_step

    def begin_if_watched(self: Any, iteration: int, config: Any) -> None:
        times.append((iteration, time.perf_counter(), time.thread_time()))
        if iteration % 2 == 0:
            begin_step(self, iteration, config)

    def end_if_watched(self: Any) -> None:
        if self.step is not None:
            end_step(self)
        iteration, wall, cpu = times[-1]
        times[-1] = (iteration, time.perf_counter() - wall, time.thread_time() - cpu)

    replace_name(observer.Observer, "begin_step", begin_if_watched)
    replace_name(observer.Observer, "end_step", end_if_watched)
    train.train(args, config)
    assert training.get_args() is args
    (figures / f"{args.rank}.json").write_text(json.dumps(times))


def measure(steps: int) -> list[dict[str, Any]]:
    """Rows of the table: CPU and wall-clock time of a watched step over an unwatched one, for each rank."""
    with tempfile.TemporaryDirectory() as folder:
        run_ranks("benchmarks.observation", RANKS, ["--rank-of", folder, str(steps)])
        rows = []
        for rank in range(RANKS):
            times = json.loads((Path(folder) / f"{rank}.json").read_text())[4:]  # warm-up
            pairs = [(a, b) for a, b in zip(times[::2], times[1::2], strict=False)]
            assert all(a[0] % 2 == 0 and b[0] == a[0] + 1 for a, b in pairs)
            row: dict[str, Any] = {"method": "watched", "rank": rank, "pairs": len(pairs)}
            for place, name in ((1, "wall"), (2, "cpu")):
                row[f"{name}_step_ms"] = 1e3 * statistics.median(b[place] for _, b in pairs)
                # The sums, not the median of ratios: every tenth watched step also writes.
                row[f"{name}_ratio"] = sum(a[place] for a, _ in pairs) / sum(b[place] for _, b in pairs)
            rows.append(row)
        return rows


def main() -> None:
    if sys.argv[1:2] == ["--rank-of"]:
        folder = Path(sys.argv[2])
        _train(int(sys.argv[3]), str(folder / "report"), folder)
        return
    options = parser("observation", __doc__, "fewer steps, noisier figures").parse_args()
    print("training on four ranks, every second step watched ...", flush=True)
    rows = measure(24 if options.quick else 104)
    show_rows("rank; pairs; step, ms=wall_step_ms:.1f; CPU, ms=cpu_step_ms:.1f; wall ratio=wall_ratio:.4f; "
              "CPU ratio=cpu_ratio:.4f", rows)  # fmt: skip
    write_rows(options.json, rows)


if __name__ == "__main__":
    main()

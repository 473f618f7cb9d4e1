"""Step time of real training with and without balanced experts, on two processes with a CPU core each.

    python -m benchmarks.experts.training [--quick] [--json FILE]

A mixture-of-experts GPT with expert parallelism 2 trains on real text (the source of Python's standard library) without
a load-balancing loss until its experts have specialised, and saves a checkpoint. From there the same steps run with
`--balance-experts` off, on, and in trials (`--balance-trial`), in turns, each run in two new processes. The gain by the
clock of all trials should be that of the separate runs, as far as the machine's speed does not change from run to run.
Compute and transfers are real; nothing is emulated. The ratio to the limit is the load of the busier rank over the
mean, 1.0 when both compute equally much.
"""

import statistics
import tempfile
from pathlib import Path
from typing import Any

from balancing.trials import TrialConfig, TrialSchedule, median_gain
from benchmarks.command import parser, show_rows, write_rows
from benchmarks.pinned import SMALL, prepare_corpus, read_events, step_milliseconds

MODEL = (
    f"{SMALL} "
    "--num-layers 2 --hidden-size 256 --ffn-hidden-size 512 --num-attention-heads 4 --seq-length 256 "
    "--max-position-embeddings 256 --normalization RMSNorm --swiglu --disable-bias-linear --num-experts 8 "
    "--moe-router-topk 2 --moe-ffn-hidden-size 768 --moe-token-dispatcher-type alltoall "
    "--moe-router-load-balancing-type none --expert-model-parallel-size 2 --micro-batch-size 2 "
    "--global-batch-size 8 --lr 1e-3 --log-interval 1 --num-workers 0 --ckpt-format torch_dist"
).split()


def _imbalance(report: Path) -> tuple[float, float]:
    """Load of the busier rank over the mean, without replicas and with them, mean of all events of the balancer."""
    events = read_events(report)
    lines = [event for event in events if event["balancer"] == "experts" and event["action"] != "observe"]
    before, after = ([line[f"imbalance_{when}"] for line in lines] for when in ("before", "after"))
    return statistics.mean(before), statistics.mean(after)


def _pairs(report: Path) -> list[float]:
    """Seconds of a step without replicas over those with them, of each pair of trials."""
    return [ratio for line in read_events(report) if line["action"] == "trial" for ratio in line["pair_ratios"]]


def measure(train: int, steps: int, rounds: int) -> list[dict[str, Any]]:
    """Rows of the table.

    train: number of steps before the measurement.
    steps: number of steps of each run.
    rounds: number of runs of each kind.
    """
    flags = {"off": [], "on": ["--balance-experts"], "trials": ["--balance-experts", "--balance-trial", str(steps)]}
    times: dict[str, list[float]] = {kind: [] for kind in flags}
    pairs: list[float] = []
    schedule = TrialSchedule(["experts"], TrialConfig(steps=steps))
    warm_up = next(at for at in range(steps) if schedule.combination(at) is not None)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = [*MODEL, *prepare_corpus(folder)]
        print(f"training {train} steps, so that experts specialise ...", flush=True)
        checkpoint = ["--save", str(folder / "checkpoint"), "--save-interval", str(train), "--train-iters", str(train)]
        step_milliseconds([*model, *checkpoint])
        model += ["--load", str(folder / "checkpoint"), "--finetune", "--train-iters", str(steps)]  # from iteration 0
        for number in range(rounds):
            for kind, own in times.items():
                report = folder / f"{kind} {number}"
                run = step_milliseconds([*model, *flags[kind], "--balance-report", str(report)])
                own += run[warm_up:]  # iterations of the trials
                pairs += _pairs(report)
                print(f"round {number + 1} of {rounds}, {kind}: {statistics.median(own):.1f} ms", flush=True)
        before, after = _imbalance(folder / "on 0")
    median = {kind: statistics.median(own) for kind, own in times.items()}
    gain = median_gain(pairs)
    assert gain is not None
    print(f"by the clock of trials: {gain}", flush=True)
    ratio = {kind: median[kind] / median["off"] for kind in times} | {"trials": 1 / gain.ratio}
    rows = [
        {
            "method": kind,
            "step_ms": median[kind],
            "ratio_to_baseline": ratio[kind],
            "ratio_to_limit": before if kind == "off" else after,
            "steps": len(own),
        }
        for kind, own in times.items()
    ]
    rows[-1]["interval"] = [1 / gain.high, 1 / gain.low]
    return rows


def main() -> None:
    options = parser("experts.training", __doc__, "fewer steps, noisier figures").parse_args()
    rows = measure(10, 20, 1) if options.quick else measure(60, 50, 3)
    show_rows("method; step, ms=step_ms:.1f; / off=ratio_to_baseline:.3f; max / mean=ratio_to_limit:.3f; "
              "steps", rows)  # fmt: skip
    write_rows(options.json, rows)


if __name__ == "__main__":
    main()

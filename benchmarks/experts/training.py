"""Step time of real training with and without balanced experts, on two processes with a CPU core each.

    python -m benchmarks.experts.training [--quick] [--json FILE]

A mixture-of-experts GPT with expert parallelism 2 trains on real text (the source of Python's standard library) without
a load-balancing loss until its experts have specialised, and saves a checkpoint. From there the same steps run with
`--balance-experts` off and on alternately, each run in two new processes. Then one run tries both by itself
(`--balance-trial`): its gain by the clock should be that of the separate runs. Compute and transfers are real; nothing
is emulated. The ratio to the limit is the load of the busier rank over the mean, 1.0 when both compute equally much.
"""

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

from balancing.files import write_text
from benchmarks.pinned import prepare_corpus, step_milliseconds

MODEL = (
    "--device cpu --num-layers 2 --hidden-size 256 --ffn-hidden-size 512 --num-attention-heads 4 --seq-length 256 "
    "--max-position-embeddings 256 --position-embedding-type rope --normalization RMSNorm --swiglu "
    "--disable-bias-linear --attention-dropout 0 --hidden-dropout 0 --num-experts 8 --moe-router-topk 2 "
    "--moe-ffn-hidden-size 768 --moe-token-dispatcher-type alltoall --moe-router-load-balancing-type none "
    "--expert-model-parallel-size 2 --micro-batch-size 2 --global-batch-size 8 --lr 1e-3 --eval-interval 100000 "
    "--eval-iters 0 --log-interval 1 --num-workers 0 --tokenizer-type NullTokenizer --vocab-size 258 "
    "--null-tokenizer-eod-id 256 --null-tokenizer-pad-id 257 --split 100,0,0 --ckpt-format torch_dist"
).split()


def _imbalance(report: Path) -> tuple[float, float]:
    """Load of the busier rank over the mean, without replicas and with them, mean of all events of the balancer."""
    lines = [json.loads(line) for line in (report / "events.jsonl").read_text().splitlines()]
    lines = [line for line in lines if line["balancer"] == "experts" and line["action"] != "observe"]
    before, after = ([line[f"imbalance_{when}"] for line in lines] for when in ("before", "after"))
    return statistics.mean(before), statistics.mean(after)


def _by_the_clock(report: Path) -> dict[str, Any]:
    """What trials say of experts, the last time."""
    lines = [json.loads(line) for line in (report / "events.jsonl").read_text().splitlines()]
    return [line for line in lines if line["action"] == "trial"][-1]


def measure(train: int, steps: int, rounds: int) -> list[dict[str, Any]]:
    """Rows of the table.

    train: number of steps before the measurement.
    steps: number of steps of each run.
    rounds: number of runs with and without the balancer.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = [*MODEL, *prepare_corpus(folder)]
        print(f"training {train} steps, so that experts specialise ...", flush=True)
        checkpoint = ["--save", str(folder / "checkpoint"), "--save-interval", str(train), "--train-iters", str(train)]
        step_milliseconds([*model, *checkpoint])
        times: dict[str, list[float]] = {"off": [], "on": []}
        report = folder / "report"
        for number in range(rounds):
            for kind in ("off", "on"):
                flags = ["--load", str(folder / "checkpoint"), "--train-iters", str(train + steps), "--finetune"]
                flags += ["--balance-experts"] if kind == "on" else []
                flags += ["--balance-report", str(report)] if (kind, number) == ("on", rounds - 1) else []
                times[kind] += step_milliseconds([*model, *flags])[4:]  # the first ones warm up and have no plan yet
                print(f"round {number + 1} of {rounds}, {kind}: {statistics.median(times[kind]):.1f} ms", flush=True)
        tried = folder / "tried"
        flags = ["--load", str(folder / "checkpoint"), "--train-iters", str(train + 1000), "--finetune"]
        flags += ["--balance-experts", "--balance-trial", str(2 * steps), "--balance-report", str(tried)]
        alone = step_milliseconds([*model, *flags])
        by_the_clock = _by_the_clock(tried)
        print(f"in one run, by the clock: {by_the_clock['gain']:.2f}x", flush=True)
        before, after = _imbalance(report)
        median = {kind: statistics.median(values) for kind, values in times.items()}
        return [
            {
                "method": kind,
                "step_ms": median[kind],
                "ratio_to_baseline": median[kind] / median["off"],
                "ratio_to_limit": {"off": before, "on": after}[kind],
                "steps": len(times[kind]),
            }
            for kind in times
        ] + [
            {
                "method": "trials",
                "step_ms": statistics.median(alone),
                "ratio_to_baseline": 1 / by_the_clock["gain"],
                "interval": [1 / by_the_clock["gain_high"], 1 / by_the_clock["gain_low"]],
                "ratio_to_limit": after,
                "steps": 2 * by_the_clock["pairs"],
            }
        ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer steps, noisier figures")
    parser.add_argument("--json", metavar="FILE", help="also write the rows to FILE")
    options = parser.parse_args()
    rows = measure(10, 10, 1) if options.quick else measure(60, 24, 3)
    print(f"{'balancing':>9} {'step, ms':>9} {'/ off':>6} {'max / mean':>10} {'steps':>6}")
    for row in rows:
        print(
            f"{row['method']:>9} {row['step_ms']:>9.1f} {row['ratio_to_baseline']:>6.3f} "
            f"{row['ratio_to_limit']:>10.3f} {row['steps']:>6}"
        )
    if options.json:
        write_text(options.json, json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()

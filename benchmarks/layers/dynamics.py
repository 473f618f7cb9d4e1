"""Cost of a layer under each dynamic scheme.

    python -m benchmarks.layers.dynamics [--quick] [--schemes TEXT] [--json FILE]

Real training on one process and one thread, on real text (the source of Python's standard library), a run for each
scheme. Costs are those of the report: CPU seconds of the training thread, per layer and micro-batch, separate for
forward and backward, mean over the last steps. The limit is the cost if it were proportional to the work that remains.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from balancing.files import write_text
from benchmarks.pinned import DYNAMIC, REPOSITORY
from benchmarks.settings import scheme_flags

MODEL = (
    "--device cpu --num-layers 4 --hidden-size 256 --num-attention-heads 4 --seq-length 1024 "
    "--max-position-embeddings 1024 --position-embedding-type rope --attention-dropout 0 --hidden-dropout 0 "
    "--untie-embeddings-and-output-weights --micro-batch-size 1 --global-batch-size 2 --lr 1e-3 --eval-interval 100000 "
    "--eval-iters 0 --log-interval 1 --num-workers 0 --tokenizer-type NullTokenizer --vocab-size 258 "
    "--null-tokenizer-eod-id 256 --null-tokenizer-pad-id 257 --split 100,0,0"
).split()
# scheme -> its flags, the layers (from 0) that it makes cheaper, and the share of their work that is left
SCHEMES = {
    "off": ("", range(4), 1.0),
    "freezing": ("--freeze-layers 2 --freeze-layers-start 2", range(2), 1 / 3),
    "pruning to 5 %": (
        scheme_flags(prune_sparsity=0.95, prune_start=2, prune_end=2, prune_sparse_density=1),
        range(4),
        None,
    ),
    "sparse attention, 4 of 16 blocks": (
        scheme_flags(sparse_attention="blocks", sparse_attention_block=64, sparse_attention_keep=4),
        range(4),
        None,
    ),
    "sparse attention by hash, 4 of 16 blocks": (
        scheme_flags(sparse_attention="hash", sparse_attention_block=64, sparse_attention_keep=4),
        range(4),
        None,
    ),
    "early exit behind layer 2": (
        scheme_flags(early_exit_layers=[2], early_exit_threshold=0.2),
        range(2, 4),
        None,
    ),
    "mixture of depths, 25 %": (scheme_flags(mixture_of_depths=0.25), (1, 3), 0.25),
}


def _events(folder: Path, flags: str, steps: int) -> list[dict[str, Any]]:
    """Train with the report on, and read what it says."""
    report = folder / f"report{time.monotonic_ns()}"
    command = [sys.executable, str(REPOSITORY / DYNAMIC), *MODEL, "--data-path", str(folder / "corpus")]
    command += ["--train-iters", str(steps), "--balance-report", str(report), *flags.split()]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=3600)
    if done.returncode:
        raise SystemExit(f"training failed with exit code {done.returncode}:\n{(done.stdout + done.stderr)[-3000:]}")
    return [json.loads(line) for line in (report / "events.jsonl").read_text().splitlines()]


def measure_layers(steps: int, warm_up: int, named: str = "") -> list[dict[str, Any]]:
    """Rows of the table: milliseconds of a layer that the scheme makes cheaper, mean over those layers.

    named: only schemes whose name has this in it, and "off".
    """
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare = [sys.executable, str(REPOSITORY / "scripts" / "prepare_data.py"), "--stdlib", "--append-eod"]
        subprocess.run([*prepare, "--output-prefix", str(folder / "corpus")], check=True, capture_output=True)
        for scheme, (flags, cheaper, left) in SCHEMES.items():
            if scheme != "off" and named not in scheme:
                continue
            events = _events(folder, flags, steps)
            costs = [e for e in events if (e["balancer"], e["unit"], e["action"]) == ("layers", "layer", "observe")]
            row: dict[str, Any] = {"method": scheme}
            for direction in ("forward", "backward"):
                means = [
                    statistics.mean(cost[f"{direction}_s"][cost["layers"].index(layer)] for layer in cheaper)
                    for cost in costs[warm_up:]
                ]
                row[f"{direction}_ms"] = 1e3 * statistics.median(means)
            if flags.startswith("--early-exit"):
                shares = [e for e in events if e.get("scheme") == "early exit"][warm_up:]
                left = statistics.mean(sum(e["tokens"][2:]) / sum(e["tokens_all"][2:]) for e in shares)
            whole = (rows or [row])[0]
            row["ratio_to_baseline"] = _total(row) / _total(whole)
            row["ratio_to_limit"] = None if left is None else row["ratio_to_baseline"] / left
            rows.append(row)
            print(f"{scheme}: measured", file=sys.stderr, flush=True)
    return rows


def _total(row: dict[str, Any]) -> float:
    return row["forward_ms"] + row["backward_ms"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer steps, noisier figures")
    parser.add_argument("--schemes", metavar="TEXT", default="", help="only schemes whose name contains TEXT")
    parser.add_argument("--json", metavar="FILE", help="also write the rows to FILE")
    options = parser.parse_args()
    rows = measure_layers(*((6, 3) if options.quick else (10, 4)), options.schemes)
    print(f"{'a layer under':>42} {'forward, ms':>12} {'backward, ms':>13} {'/ off':>6} {'/ limit':>8}")
    for row in rows:
        limit = "" if row["ratio_to_limit"] is None else f"{row['ratio_to_limit']:.2f}"
        print(
            f"{row['method']:>42} {row['forward_ms']:>12.2f} {row['backward_ms']:>13.2f} "
            f"{row['ratio_to_baseline']:>6.2f} {limit:>8}"
        )
    if options.json:
        write_text(options.json, json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()

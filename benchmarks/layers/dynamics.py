"""Cost of a layer under each dynamic scheme, and the density below which sparse products pay.

    python -m benchmarks.layers.dynamics [--quick] [--table layers|crossover] [--schemes TEXT] [--json FILE]

Real training on one process and one thread, on real text (the source of Python's standard library), a run for each
scheme. Costs are those of the report: CPU seconds of the training thread, per layer and micro-batch, separate for
forward and backward, mean over the last steps. The limit is the cost if it were proportional to the work that remains.
The second table times products with matrices of different density, dense and sparse, forward and backward.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from balancing.files import write_text
from benchmarks.pinned import DYNAMIC, REPOSITORY
from benchmarks.settings import scheme_flags
from examples.dynamic_models.schemes import SparsePattern, sparse_linear

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
DENSITIES = (0.5, 0.2, 0.1, 0.05, 0.02, 0.01)


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
    """Rows of the first table: milliseconds of a layer that the scheme makes cheaper, mean over those layers.

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


def _seconds(run: Callable[[], object], repeats: int) -> float:
    run()
    times = []
    for _ in range(repeats):
        begin = time.thread_time()
        run()
        times.append(time.thread_time() - begin)
    return statistics.median(times)


def measure_crossover(sizes: list[tuple[int, int]], tokens: int, repeats: int) -> list[dict[str, Any]]:
    """Rows of the second table, for weights [out, in]: forward and backward of one product, in float32."""
    torch.manual_seed(0)
    rows = []
    for size in sizes:
        hidden = torch.randn(tokens, size[1], requires_grad=True)
        gradient = torch.randn(tokens, size[0])
        whole = torch.randn(size)
        weight = whole.clone().requires_grad_()

        def dense(weight: torch.Tensor = weight, hidden: torch.Tensor = hidden, gradient: Any = gradient) -> None:
            torch.nn.functional.linear(hidden, weight).backward(gradient)

        baseline = _seconds(dense, repeats)
        for density in DENSITIES:
            mask = torch.rand(size) < density
            pattern, pruned = SparsePattern(mask), (whole * mask).requires_grad_()

            def sparse(
                weight: torch.Tensor = pruned,
                pattern: SparsePattern = pattern,
                hidden: torch.Tensor = hidden,
                gradient: Any = gradient,
            ) -> None:
                sparse_linear(hidden, weight, pattern).backward(gradient)

            seconds = _seconds(sparse, repeats)
            rows.append(
                {
                    "method": f"{size[0]} x {size[1]}",
                    "density": density,
                    "sparse_ms": 1e3 * seconds,
                    "dense_ms": 1e3 * baseline,
                    "ratio_to_baseline": seconds / baseline,
                    "ratio_to_limit": seconds / (baseline * density),
                }
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer steps, noisier figures")
    parser.add_argument("--table", choices=["layers", "crossover"], help="only one of the two tables")
    parser.add_argument("--schemes", metavar="TEXT", default="", help="only schemes whose name contains TEXT")
    parser.add_argument("--json", metavar="FILE", help="also write the rows to FILE")
    options = parser.parse_args()
    torch.set_num_threads(1)
    tables: dict[str, list[dict[str, Any]]] = {}
    if options.table != "crossover":
        tables["layers"] = measure_layers(*((6, 3) if options.quick else (10, 4)), options.schemes)
        print(f"{'a layer under':>42} {'forward, ms':>12} {'backward, ms':>13} {'/ off':>6} {'/ limit':>8}")
        for row in tables["layers"]:
            limit = "" if row["ratio_to_limit"] is None else f"{row['ratio_to_limit']:.2f}"
            print(
                f"{row['method']:>42} {row['forward_ms']:>12.2f} {row['backward_ms']:>13.2f} "
                f"{row['ratio_to_baseline']:>6.2f} {limit:>8}"
            )
    if options.table != "layers":
        sizes, repeats = ([(1024, 256)], 3) if options.quick else ([(1024, 256), (2048, 512), (4096, 1024)], 7)
        tables["crossover"] = measure_crossover(sizes, 1024, repeats)
        print(f"{'weight':>12} {'density':>8} {'sparse, ms':>11} {'dense, ms':>10} {'/ dense':>8} {'/ limit':>8}")
        for row in tables["crossover"]:
            print(
                f"{row['method']:>12} {row['density']:>8} {row['sparse_ms']:>11.2f} {row['dense_ms']:>10.2f} "
                f"{row['ratio_to_baseline']:>8.2f} {row['ratio_to_limit']:>8.2f}"
            )
    if options.json:
        write_text(options.json, json.dumps(tables, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""Cost of a layer under each dynamic scheme.

    python -m benchmarks.layers.dynamics [--quick] [--schemes TEXT] [--json FILE]

Real training on one process and one thread, on real text (the source of Python's standard library), a run for each
scheme. Costs are those of the report: CPU seconds of the training thread, per layer and micro-batch, separate for
forward and backward, mean over the last steps. The limit is the cost if it were proportional to the work that remains.
"""

import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.command import parser, show_rows, write_rows
from benchmarks.pinned import SMALL, prepare_corpus, read_events, train_alone
from benchmarks.settings import scheme_flags

MODEL = (
    f"{SMALL} "
    "--num-layers 4 --hidden-size 256 --num-attention-heads 4 --seq-length 1024 --max-position-embeddings 1024 "
    "--untie-embeddings-and-output-weights --micro-batch-size 1 --global-batch-size 2 --lr 1e-3 --log-interval 1 "
    "--num-workers 0"
).split()
# scheme -> its flags, the layers (from 0) that it makes cheaper, and the share of their work that is left
SCHEMES = {
    "off": ("", range(4), 1.0),
    "freezing": ("--freeze-layers 2 --freeze-layers-start 2", range(2), 1 / 3),
    "pruning to 5 %": (scheme_flags(prune_sparsity=0.95, prune_start=2, prune_end=2, prune_sparse_density=1), range(4),
                       None),
    **{
        f"sparse attention{how}, 4 of 16 blocks": (
            scheme_flags(sparse_attention=kind, sparse_attention_block=64, sparse_attention_keep=4), range(4), None
        ) for kind, how in (("blocks", ""), ("hash", " by hash"))
    },
    "early exit behind layer 2": (scheme_flags(early_exit_layers=[2], early_exit_threshold=0.2), range(2, 4), None),
    "mixture of depths, 25 %": (scheme_flags(mixture_of_depths=0.25), (1, 3), 0.25),
}  # fmt: skip


def measure_layers(steps: int, warm_up: int, named: str = "") -> list[dict[str, Any]]:
    """Rows of the table: milliseconds of a layer that the scheme makes cheaper, mean over those layers.

    named: only schemes whose name has this in it, and "off".
    """
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = [*MODEL, *prepare_corpus(folder), "--train-iters", str(steps)]
        for scheme, (flags, cheaper, left) in SCHEMES.items():
            if scheme != "off" and named not in scheme:
                continue
            report = folder / scheme
            train_alone([*model, *flags.split(), "--balance-report", str(report)])
            events = read_events(report)
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
            of_row, of_off = (each["forward_ms"] + each["backward_ms"] for each in (row, (rows or [row])[0]))
            row["ratio_to_baseline"] = of_row / of_off
            row["ratio_to_limit"] = None if left is None else row["ratio_to_baseline"] / left
            rows.append(row)
            print(f"{scheme}: measured", file=sys.stderr, flush=True)
    return rows


def main() -> None:
    options_of = parser("layers.dynamics", __doc__, "fewer steps, noisier figures")
    options_of.add_argument("--schemes", metavar="TEXT", default="", help="only schemes whose name contains TEXT")
    options = options_of.parse_args()
    rows = measure_layers(*((6, 3) if options.quick else (10, 4)), options.schemes)
    show_rows("method; forward, ms=forward_ms:.2f; backward, ms=backward_ms:.2f; / off=ratio_to_baseline:.2f; "
              "/ limit=ratio_to_limit:.2f", rows)  # fmt: skip
    write_rows(options.json, rows)


if __name__ == "__main__":
    main()

"""Cost of balancers that have nothing to gain: host time of a step, and its share of real steps.

    python -m benchmarks.idle [--quick] [--json FILE]

Small runs on gloo ranks whose loads are even: equal layers, samples that are one document each, routing that is forced
to be even. In every step, the CPU time of the training thread inside the balancers' own code is added up: callbacks of
steps, timing hooks of layers, micro-batches and plans of sequences, loads and splits of experts. Work that Megatron-LM
does without balancers as well is not counted: dispatching tokens, gathering their counts, attention. With balanced
sequences our code reads micro-batches instead of Megatron-LM's script; the script's time for that is printed beside
ours. A figure is the median over steps, of the rank with the highest.

The time per layer and micro-batch (for sequences, per micro-batch) is then added up for real jobs, as a share of their
modelled step (`balancing_tools.whatif`). Hosts run ahead of their GPUs, so this is an upper bound. If `--balance all`
finds nothing to balance it switches everything off; the benchmark checks that no patch and no callback is left. Target:
at most 1 % of a step.
"""

import functools
import itertools
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from balancing.cluster import Cluster
from balancing_tools.whatif.forecast import forecast
from balancing_tools.whatif.job import read_recipe_flags
from benchmarks.command import parser, show_rows, write_rows
from benchmarks.pinned import SMALL, prepare_corpus, run_ranks
from benchmarks.replaced import replace_name
from benchmarks.settings import settings

RANKS, STAGES, LAYERS, MICRO_BATCHES, TOKENS = 4, 2, 8, 8, 64
WARM_UP = 4  # steps
MODEL = (
    f"{SMALL} "
    f"--num-layers {LAYERS} --hidden-size 32 --num-attention-heads 4 --seq-length {TOKENS} --num-experts 8 "
    f"--max-position-embeddings {TOKENS} --swiglu --disable-bias-linear --moe-router-topk 2 --moe-ffn-hidden-size 32 "
    "--moe-token-dispatcher-type alltoall --moe-aux-loss-coeff 1e-2 --moe-router-force-load-balancing --lr 1e-3 "
    "--micro-batch-size 1 --log-interval 100 --num-workers 1 --dataloader-inter-document-masking "
    "--distributed-timeout-minutes 5"
).split()
LAYOUT = f"--pipeline-model-parallel-size {STAGES} --expert-model-parallel-size 2 --global-batch-size 16"
# Name -> ranks, flags.
RUNS = {
    "layers": (RANKS, f"{LAYOUT} --balance layers"),
    "sequences": (RANKS, f"{LAYOUT} --balance sequences"),
    "experts": (RANKS, f"{LAYOUT} --balance experts {settings('experts', min_gain=0.99)}"),
    "all, one rank": (1, f"--global-batch-size {MICRO_BATCHES} --balance all"),
}
# Name -> recipe, GPUs, cluster.
RECIPES = Path(__file__).parent / "recipes/moe_recipes.json"
JOBS = {
    "DeepSeek-V3": ("deepseek_v3/b200/mxfp8_256GPU_TP1PP8EP32", 256, "b200-8x400g"),
    "Qwen3 235B": ("qwen3_235b/h100/bf16_256GPU_TP2PP8EP32", 256, "h100-8x400g"),
    "Qwen3 30B": ("qwen3_30b/h100/bf16_32GPU_TP1PP1EP8", 32, "h100-8x400g"),
}


class _Count:
    """Processor time of this thread inside of some functions, without that of others that they call."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._since, self._counts = 0.0, [False]

    def _switch(self) -> None:
        now = time.thread_time()
        if self._counts[-1]:
            self.seconds += now - self._since
        self._since = now

    def wrap(self, owner: Any, name: str, counts: bool = True) -> None:
        """Count what `owner.name` takes, or leave it out."""
        original = getattr(owner, name)

        @functools.wraps(original)
        def call(*given: Any, **named: Any) -> Any:
            self._switch()
            self._counts.append(counts)
            try:
                return original(*given, **named)
            finally:
                self._switch()
                self._counts.pop()

        replace_name(owner, name, call)


def _count_balancers() -> tuple[_Count, _Count]:
    """Counts of balancers' code, and of Megatron-LM's reading of micro-batches."""
    from megatron.core.transformer.moe.moe_layer import MoELayer

    from balancing.experts.engine.slots import ReplicaSlots
    from megatron.balanced.experts import balancer as experts
    from megatron.balanced.experts import moe_layer
    from megatron.balanced.layers import balancer as layers
    from megatron.balanced.observe import observer, timing_hooks
    from megatron.balanced.sequences import balancer as sequences
    from megatron.balanced.sequences import moved_tokens
    from megatron.balanced.shared import callbacks
    from megatron.balanced.trainer import data

    count = _Count()
    for owner in (observer.Observer, layers.LayerBalancer, sequences.SequenceBalancer, experts.ExpertBalancer):
        for name in vars(callbacks.StepCallback):
            if not name.startswith("_") and callable(vars(owner).get(name)):
                count.wrap(owner, name)
    for name in ("enter", "leave"):
        count.wrap(timing_hooks._Part, name)
    for name in ("open_backward", "close_backward", "begin_micro_batch", "begin_call", "end_forward_call"):
        count.wrap(timing_hooks.TimingHooks, name)
    count.wrap(timing_hooks.TimingHooks, "end_backward_call")
    count.wrap(moved_tokens.MovedTokens, "next_batch")
    count.wrap(moe_layer.BalancedMoELayer, "preprocess")
    count.wrap(moe_layer.BalancedMoELayer, "postprocess")
    count.wrap(ReplicaSlots, "end_pass")
    for name in ("preprocess", "postprocess"):  # Megatron-LM's own
        count.wrap(MoELayer, name, counts=False)
    count.wrap(moe_layer, "gather_from_sequence_parallel_region", counts=False)
    reading = _Count()
    for name in ("_next_batch", "_packed_parameters"):
        reading.wrap(data, name)
    return count, reading


def _train(argv: list[str], figures: Path) -> None:
    """One rank: train, and keep the processor time of balancers in each step, and what is left of them."""
    from megatron.balanced.trainer.arguments import parse_arguments

    args, config = parse_arguments(argv)

    from megatron.training import training

    from megatron.balanced.experts.moe_layer import BalancedMoELayer
    from megatron.balanced.trainer import train

    count, reading = _count_balancers()
    times: list[tuple[float, float]] = []
    left: list[str] = []
    replicas: list[int] = []  # layers of this rank that have some
    step = training.train_step

    @functools.wraps(step)
    def timed(*given: Any, **named: Any) -> Any:
        if not left:
            left.extend(["train_step"] * (training.train_step is not timed))
        times.append((count.seconds, reading.seconds))
        found = step(*given, **named)
        layers = [layer for chunk in given[2] for layer in chunk.modules() if isinstance(layer, BalancedMoELayer)]
        replicas.append(sum(bool(layer.placement.replicas) for layer in layers))
        return found

    replace_name(training, "train_step", timed)
    train.train(args, config)
    steps = [(b[0] - a[0], b[1] - a[1]) for a, b in itertools.pairwise(times)][WARM_UP:]
    (figures / f"{args.rank}.json").write_text(json.dumps({"steps": steps, "left": left, "replicas": max(replicas)}))


def _run(name: str, steps: int, folder: Path, data: list[str]) -> list[dict[str, Any]]:
    """[rank], what each rank kept of one run."""
    ranks, flags = RUNS[name]
    own = [*data, *flags.split(), "--train-iters", str(steps)]
    run_ranks("benchmarks.idle", ranks, ["--rank-of", str(folder), *MODEL, *own])
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]


def measure(steps: int) -> list[dict[str, Any]]:
    """A row for each run: milliseconds of processor time of balancers in a step, and of a layer and micro-batch."""
    kept: dict[str, list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        data = prepare_corpus(Path(folder), [TOKENS] * 4000)  # each document a sample
        for name in RUNS:
            print(f"{name} ...", flush=True)
            kept[name] = _run(name, steps, Path(folder), data)
    for rank in kept["all, one rank"]:
        assert not rank["left"], f"balancers that are off left {rank['left']}"
    medians = {  # [rank], of balancers and of Megatron-LM's reading
        name: [[statistics.median(each) for each in zip(*rank["steps"], strict=True)] for rank in ranks]
        for name, ranks in kept.items()
    }
    read = max(reading for _, reading in medians["layers"])  # by Megatron-LM's script
    rows = []
    for name, ranks in medians.items():
        own = max(each for each, _ in ranks)
        row: dict[str, Any] = {"method": name, "own_ms": 1e3 * own, "left": kept[name][0]["left"]}
        row["replicas"] = max(rank["replicas"] for rank in kept[name])
        if name in ("layers", "experts"):
            row["layer_us"] = 1e6 * own / (LAYERS // STAGES * MICRO_BATCHES)
        if name == "sequences":
            row |= {"reading_ms": 1e3 * read, "micro_batch_us": 1e6 * (own - read) / MICRO_BATCHES}
        rows.append(row)
    return rows


def of_jobs(layer_us: float, micro_batch_us: float) -> dict[str, float]:
    """Real job -> share of its modelled step of what is added to each layer and micro-batch of a rank, and to each
    micro-batch."""
    recipes = json.loads(RECIPES.read_text())
    found = {}
    for name, (recipe, gpus, cluster) in JOBS.items():
        job = read_recipe_flags(recipes[recipe]).on(gpus)
        step = forecast(job, Cluster.from_spec(cluster, gpus))[0].step_seconds
        layers = -(-job.num_layers // job.pipeline_model_parallel_size)
        found[name] = (layer_us * layers + micro_batch_us) * 1e-6 * job.micro_batches / step
    return found


def main() -> None:
    if sys.argv[1:2] == ["--rank-of"]:
        _train(sys.argv[3:], Path(sys.argv[2]))
        return
    options = parser("idle", __doc__, "fewer steps, noisier figures").parse_args()
    rows = measure(12 if options.quick else 24)
    for row in rows:
        row |= of_jobs(row.get("layer_us", 0.0), row.get("micro_batch_us", 0.0))
    show_rows("method; own, ms=own_ms:.2f; us a layer=layer_us:.1f; us a micro-batch=micro_batch_us:.1f; "
              + "; ".join(f"{job}={job}:.2%" for job in JOBS), rows)  # fmt: skip
    write_rows(options.json, rows)


if __name__ == "__main__":
    main()

"""Recording of layer costs from the training of a small dynamic model, for `benchmarks.layers.plans --trace`.

    python -m benchmarks.layers.record --scheme NAME --out FILE.npz

A GPT of 32 layers trains on real text (the source of Python's standard library, a token a byte) in one process and one
thread, with the scheme's own flags and its whole schedule compressed into the run. Costs are those of
`--balance-report`: CPU seconds of the training thread, layer by layer, forward and backward, with embedding and head;
input and weight gradients are not timed separately. They are stored as measured. On a shared core they are noisy, by a
tenth over tens of iterations, so the replay takes medians over a fifth of the run, which preserves steps.

With mixture of experts, layers cost the same on one process whatever the routing; on several they are uneven because
ranks wait for the one with the fullest expert. So the routing of that scheme is recorded too: the tokens of the fullest
expert relative to the mean, by layer and iteration. The replay assumes one expert a rank and scales the experts' part
of a layer by that ratio, as the modelled trace does.
"""

import argparse
import tempfile
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from balancing.layers import LayerSeconds
from balancing.report import History, read_history
from benchmarks.layers.traces import EXPERT_SHARE, TRACES, Trace, trace
from benchmarks.pinned import DYNAMIC, SMALL, prepare_corpus, train_alone
from benchmarks.settings import scheme_flags

__all__ = ["FLAGS", "record", "replay"]

LAYERS, ITERATIONS, _WARM_UP, _WINDOW = 32, 80, 2, 15
# Freed memory is kept. Given back, each backward pass would fetch it anew, and its first layers seem to cost more.
_ENVIRONMENT = {
    "MALLOC_MMAP_THRESHOLD_": str(2**32),
    "MALLOC_TRIM_THRESHOLD_": str(2**34),
}
MODEL = (
    f"{SMALL} "
    f"--num-layers {LAYERS} --hidden-size 128 --ffn-hidden-size 512 --num-attention-heads 4 --seq-length 512 "
    "--max-position-embeddings 512 --normalization RMSNorm --disable-bias-linear "
    "--untie-embeddings-and-output-weights --micro-batch-size 1 --global-batch-size 1 --lr 1e-3 --num-workers 0 "
    "--log-interval 10"
).split()
FLAGS = {
    "layer freezing": "--freeze-layers 24 --freeze-layers-start 10 --freeze-layers-interval 2",
    # So early in training, layers behind the first hardly tell tokens apart: nearly all that are left exit together.
    "early exit": scheme_flags(early_exit_layers=[1, 16], early_exit_threshold=0.4, early_exit_start=20),
    "mixture of depths": scheme_flags(mixture_of_depths=0.125),
    "sparse attention": scheme_flags(sparse_attention="hash", sparse_attention_block=32, sparse_attention_keep=4),
    "gradual pruning": scheme_flags(
        prune_sparsity=0.9, prune_start=24, prune_end=56, prune_interval=8, prune_sparse_density=0.1
    ),
    "mixture of experts": "--num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 256 "
    "--moe-token-dispatcher-type alltoall --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2",
}
_PERIOD = {"mixture of depths": 2}  # layers of a kind stand that far apart


def record(scheme: str, folder: Path) -> dict[str, np.ndarray]:
    """Train, and return what `replay` takes. Raises SystemExit where training fails.

    seconds: float array [iteration, layer, pass], per micro-batch, the embedding and the head behind the layers.
    fullest: [iteration, layer], tokens of the fullest expert over the mean; ones without experts.
    """
    report = folder / "report"
    flags = [*MODEL, *prepare_corpus(folder), *FLAGS[scheme].split(), "--train-iters", str(ITERATIONS)]
    train_alone([*flags, "--balance-report", str(report)], _ENVIRONMENT)
    history = read_history(report)
    iterations = sorted(history.layers)[_WARM_UP:]
    seconds = np.array([_seconds(history, iteration) for iteration in iterations])
    fullest = np.array([_fullest(history, iteration) for iteration in iterations])
    shown = " ".join([*MODEL, *FLAGS[scheme].split()])
    return {
        "scheme": np.array(scheme),
        "command": np.array(f"python -m benchmarks.layers.record --scheme '{scheme}': {DYNAMIC} {shown}"),
        "seconds": seconds.astype(np.float16),  # to a tenth of a percent
        "fullest": fullest.astype(np.float16),
    }


def _seconds(history: History, iteration: int) -> np.ndarray:
    line = history.layers[iteration]
    at = {name: number for number, name in enumerate(line["layers"])}
    passes = np.stack([line["forward_s"], line["backward_s"] + line["recompute_s"]], axis=1)
    return np.array([passes[at[name]] for name in (*range(LAYERS), "embedding", "head")])


def _fullest(history: History, iteration: int) -> np.ndarray:
    lines = history.experts.get(iteration, {})
    tokens: Iterable[np.ndarray] = (lines[n]["tokens_per_expert"] if n in lines else np.ones(1) for n in range(LAYERS))
    return np.array([each.max() / each.mean() for each in tokens])


def _medians(values: np.ndarray) -> np.ndarray:
    """Of `_WINDOW` iterations around each, fewer at the ends."""
    half = _WINDOW // 2
    whole = values.astype(float)
    around = [whole[max(at - half, 0) : at + half + 1] for at in range(len(whole))]
    return np.array([np.median(each, axis=0) for each in around])


def replay(path: Path, layers: int, iterations: int) -> Trace:
    """The recorded costs, for a run and a model of another length.

    Each recorded iteration, and each recorded layer (among those of its kind), stands for as many as it has to. Costs
    are scaled together so that the mean layer begins with the seconds of a dense one in the modelled trace, whose bytes
    and messages it takes over: what is recorded is how layers compare. Raises OSError, or ValueError if FILE is none of
    `record`'s.
    """
    try:
        with np.load(path) as file:
            name, seconds, fullest = str(file["scheme"]), _medians(file["seconds"]), _medians(file["fullest"])
    except KeyError as error:
        raise ValueError(f"{path} lacks {error}; make it with python -m benchmarks.layers.record") from None
    if name not in TRACES:
        raise ValueError(f"{path} is of scheme {name!r}, not one of {', '.join(TRACES)}")
    like = trace("layer freezing", layers, 1)
    recorded, period = seconds.shape[1] - 2, _PERIOD.get(name, 1)
    at = np.zeros(layers, dtype=int)
    for kind in range(period):
        targets, sources = np.arange(kind, layers, period), np.arange(kind, recorded, period)
        at[targets] = sources[((np.arange(len(targets)) + 0.5) * len(sources) / len(targets)).astype(int)]
    stretched = 1 + EXPERT_SHARE * (fullest - 1)
    scale = like.costs[0].total.mean() / seconds[0, :recorded].sum(-1).mean()
    costs = []
    for now in (np.arange(iterations) * len(seconds) // iterations).tolist():
        passes = scale * seconds[now]
        own = passes[at] * stretched[now, at, None]
        embedding, head = passes[recorded].tolist(), passes[recorded + 1].tolist()
        costs.append(LayerSeconds(own[:, 0], own[:, 1], (embedding[0], embedding[1]), (head[0], head[1])))
    return Trace(name, costs, like.parameters, like.end_parameters, like.layer_bytes, like.message_bytes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scheme", choices=[*FLAGS], required=True)
    parser.add_argument("--out", type=Path, metavar="FILE.npz", required=True)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        found = record(options.scheme, Path(name))
    np.savez_compressed(options.out, **found)  # type: ignore[arg-type]
    seconds = found["seconds"][:, :LAYERS].sum(-1) * 1e3
    ratio = seconds.max(1) / seconds.mean(1)
    print(f"{len(seconds)} iterations; milliseconds of a layer, mean: {seconds[0].mean():.1f} at first, "
          f"{seconds[-1].mean():.1f} at last; slowest over mean: {ratio[0]:.2f} and {ratio[-1]:.2f}")  # fmt: skip


if __name__ == "__main__":
    main()

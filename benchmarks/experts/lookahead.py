"""Looking ahead: does the next layer's router, applied one layer early, tell the loads of this very micro-batch?

    python -m benchmarks.experts.lookahead [--quick] [--json FILE]

A mixture-of-experts GPT trains on real text (the source of Python's standard library) without a load-balancing loss.
In windows of consecutive iterations the router of each MoE layer but the first is also applied to what the layer
before it gets (its input) and to what that layer returns (its output), each with the norm of the router's own layer.
Replicas are then planned from each prediction and the true load is split over them, as in training:

- last iteration: the mean micro-batch of the iteration before, which training plans from;
- micro-batch before: its load in the same layer;
- layer's input, layer's output: the router of the next layer, one layer early, for this very micro-batch;
- known: the load itself.

Drift of 0.2 or 0.3 is added: in every iteration, the router's logits get other random biases, so large that this
fraction of all tokens changes experts from one iteration to the next (total variation). Predictions that use the router
know the biases of their iteration. Each sequence of a micro-batch stands for one expert-parallel rank. The figure is
the load of the busiest rank over the mean; "off by" is the total variation between prediction and load, "sent" the
number of replicas per rank that were not there one micro-batch before. Takes about 7 minutes on one core, 2 with
--quick.
"""

import argparse
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from balancing.cluster import Cluster
from balancing.experts import plan_replicas, traffic
from balancing.experts.config import ExpertConfig
from balancing.experts.load_history import total_variation
from balancing.files import write_text
from benchmarks.pinned import prepare_corpus

__all__ = ["METHODS", "evaluate", "with_drift"]

METHODS = ("none", "last iteration", "micro-batch before", "layer's input", "layer's output", "known")
DRIFT = (0.0, 0.2, 0.3)
RANKS, EXPERTS, TOP_K, LAYERS, MICRO_BATCHES, WINDOW = 8, 32, 2, 6, 4, 10
MODEL = (
    f"--device cpu --num-layers {LAYERS} --hidden-size 128 --ffn-hidden-size 256 --num-attention-heads 4 "
    "--seq-length 256 --max-position-embeddings 256 --position-embedding-type rope --normalization RMSNorm --swiglu "
    f"--disable-bias-linear --attention-dropout 0 --hidden-dropout 0 --num-experts {EXPERTS} "
    f"--moe-router-topk {TOP_K} --moe-ffn-hidden-size 64 --moe-token-dispatcher-type alltoall "
    f"--moe-router-load-balancing-type none --micro-batch-size {RANKS} --global-batch-size {RANKS * MICRO_BATCHES} "
    "--lr 2e-3 --eval-interval 100000 --eval-iters 0 --log-interval 10 --num-workers 0 --tokenizer-type NullTokenizer "
    "--vocab-size 258 --null-tokenizer-eod-id 256 --null-tokenizer-pad-id 257 --split 100,0,0"
).split()


def train(iterations: int, windows: tuple[int, ...]) -> dict[int, np.ndarray]:
    """Train, and record logits in windows of `WINDOW` iterations that begin at `windows`.

    Returns float32 [iteration, micro_batch, layer, 3, source, token, expert] for each window: of the router's own
    input, and of the input and the output of the layer before.
    """
    from megatron.balanced.trainer.arguments import parse_arguments

    with tempfile.TemporaryDirectory() as folder:
        data = prepare_corpus(Path(folder))
        args, config = parse_arguments([*MODEL, *data, "--train-iters", str(iterations)])

        from megatron.balanced.shared.callbacks import StepCallback
        from megatron.balanced.trainer.train import train as run

        class Record(StepCallback):
            """Logits of the windows."""

            def __init__(self) -> None:
                self.found: dict[int, list[torch.Tensor]] = {at: [] for at in windows}
                self._own: list[torch.Tensor] | None = None
                self._layers: list[Any] = []

            def attach(self, chunks: list[Any]) -> None:
                self._layers = [each for each in chunks[0].modules() if hasattr(each, "pre_mlp_layernorm")]
                for layer in self._layers:
                    layer.pre_mlp_layernorm.register_forward_pre_hook(self._before_experts)
                    layer.register_forward_hook(self._after_layer)

            def begin_step(self, iteration: int, config: Any) -> None:
                within = [at for at in windows if at <= iteration < at + WINDOW]
                self._own = self.found[within[0]] if within else None

            @torch.no_grad()
            def _logits(self, layer: Any, hidden: torch.Tensor) -> torch.Tensor:
                logits = layer.mlp.router.gating(layer.pre_mlp_layernorm.forward(hidden))
                return logits.float().transpose(0, 1)  # [source, token, expert]

            def _before_experts(self, norm: Any, inputs: tuple) -> None:
                if self._own is None:
                    return
                at = next(at for at, layer in enumerate(self._layers) if layer.pre_mlp_layernorm is norm)
                self._own += [self._logits(layer, inputs[0]) for layer in self._layers[at : at + 2]]

            def _after_layer(self, layer: Any, inputs: tuple, output: Any) -> None:
                if self._own is not None and layer is not self._layers[-1]:
                    self._own.append(self._logits(self._layers[self._layers.index(layer) + 1], output[0]))

        record = Record()
        run(args, config, [record])
    # In the order of a forward pass: of each layer its own, and twice the next one's; of the last one its own.
    each = 3 * LAYERS - 2
    recorded = {}
    for at, tensors in record.found.items():
        stacked = torch.stack(tensors).numpy().reshape(-1, MICRO_BATCHES, each, *tensors[0].shape)
        own, given, returned = stacked[:, :, 3::3], stacked[:, :, 1::3], stacked[:, :, 2::3]
        recorded[at] = np.stack([own, given, returned], 3)
    return recorded


def _loads(logits: np.ndarray) -> np.ndarray:
    """int64 [..., source, expert], tokens of each expert by the `TOP_K` largest logits [..., source, token, expert]."""
    chosen = np.argpartition(-logits, TOP_K - 1, -1)[..., :TOP_K]
    return (chosen[..., None] == np.arange(EXPERTS)).sum((-3, -2))


def with_drift(logits: np.ndarray, drift: float, seed: int = 0) -> tuple[np.ndarray, float]:
    """Loads [iteration, micro_batch, layer, 3, source, expert] under biases that make iterations `drift` apart, and how
    far apart they are: total variation of the whole load from one iteration to the next, mean of all layers."""
    direction = np.random.default_rng(seed).standard_normal((len(logits), 1, logits.shape[2], 1, 1, 1, EXPERTS))

    def moved(logits: np.ndarray, strength: np.ndarray) -> np.ndarray:
        return _loads(logits + np.float32(strength[:, None, None, None, None]) * direction.astype(np.float32))

    def apart(loads: np.ndarray) -> np.ndarray:
        own = loads[:, :, :, 0].sum((1, 3))[:, :, None]  # [iteration, layer, 1, expert]
        return total_variation(own[1:], own[:-1]).mean(0)

    low, high = np.zeros(logits.shape[2]), np.full(logits.shape[2], 8.0)
    for _ in range(14 if drift else 0):
        middle = (low + high) / 2
        less = apart(moved(logits[:, :, :, :1], middle)) < drift
        low, high = np.where(less, middle, low), np.where(less, high, middle)
    loads = moved(logits, low)
    return loads, float(apart(loads).mean())


def _predictions(loads: np.ndarray) -> Iterator[tuple[int, dict[str, np.ndarray]]]:
    """Layers, and for each method what it plans from [source, expert], of all micro-batches but those of the first
    iteration. loads: [iteration, micro_batch, layer, 3, source, expert]."""
    for at, batch, layer in np.ndindex(*loads.shape[:3]):
        if at:
            own = loads[:, :, layer, 0]
            _, given, returned = loads[at, batch, layer]
            before = own[at, batch - 1] if batch else own[at - 1, -1]
            known = own[at, batch]
            yield layer, dict(zip(METHODS, (known, own[at - 1].mean(0), before, given, returned, known), strict=True))


def evaluate(loads: np.ndarray) -> dict[str, tuple[float, float, float, float]]:
    """Of each method: busiest rank over the mean, mean and 99th percentile, after replicas planned from its prediction;
    total variation between prediction and load; replicas a rank that were not there a micro-batch before."""
    cluster, slots = Cluster.sheet("h100-8x400g").relabel(1, RANKS), ExpertConfig().replica_slots
    fullest, apart, sent = ({name: [] for name in METHODS} for _ in range(3))
    placed: dict[tuple[str, int], set[tuple[int, int]]] = {}
    for layer, found in _predictions(loads):
        for name, predicted in found.items():
            method: Any = "none" if name == "none" else "quota"
            placement = plan_replicas(predicted, cluster, slots=slots, method=method)
            tokens = traffic(found["known"], placement).sum(0)
            fullest[name].append(float(tokens.max() / tokens.mean()))
            apart[name].append(float(total_variation(predicted, found["known"])))
            now = {(expert, rank) for rank, own in enumerate(placement.slot_expert.tolist()) for expert in own}
            if (name, layer) in placed:
                sent[name].append(len({each for each in now - placed[name, layer] if each[0] >= 0}) / RANKS)
            placed[name, layer] = now
    return {
        name: (
            float(np.mean(own)),
            float(np.percentile(own, 99)),
            float(np.mean(apart[name])),
            float(np.mean(sent[name])),
        )
        for name, own in fullest.items()
    }


def main(arguments: list[str] | None = None) -> int:
    """Train, evaluate and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="40 iterations instead of 200")
    parser.add_argument("--json", metavar="FILE", help="write the rows to FILE")
    options = parser.parse_args(arguments)
    iterations, windows = (40, (30,)) if options.quick else (200, (30, 100, 190))
    rows = []
    for at, logits in train(iterations, windows).items():
        for drift in DRIFT:
            loads, apart = with_drift(logits, drift)
            print(f"\niterations {at} to {at + WINDOW - 1}, {apart:.3f} of all tokens change experts an iteration")
            print(f"{'planned from':20}{'max / mean':>11}{'p99':>8}{'off by':>8}{'sent':>7}")
            for name, (mean, most, off, sent) in evaluate(loads).items():
                print(f"{name:20}{mean:11.3f}{most:8.3f}{off:8.3f}{sent:7.2f}", flush=True)
                row = {"from": at, "drift": apart, "method": name, "mean": mean, "p99": most, "off": off, "sent": sent}
                rows.append(row)
    if options.json:
        write_text(options.json, json.dumps(rows, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""Costs of layers during the training of six kinds of dynamic models, modelled from published schedules, not measured.

Each trace is a training run of some thousand iterations with the whole published schedule compressed into it, so plans
are outdated 2.5 to 10 times sooner than in a real run, and moves have that much less time to pay off. Compute is
FLOPs at 400 TFLOP/s: a layer of hidden size h takes 24 h^2 per token for its matrices and 2 s h for causal attention
over s tokens; the backward takes as much for the inputs (twice for attention) and as much for the weights. The head of
32000 words takes 2 h 32000. One micro-batch is one sequence.

- mixture of experts: a layer waits for its fullest expert-parallel rank. Rank max / mean of SmartMoE's recorded loads
  is 1.28 to 2.43 by layer, with 6 to 9 % of the tokens changing rank per iteration; experts are 60 % of a layer.
- gradual pruning: global magnitude pruning to 90 % by Zhu and Gupta's cubic schedule (arXiv 1710.01878), from 30 to
  70 % of the run in 5 steps. Weights of layers differ in scale (lognormal, 0.35, and a trend over depth), so a global
  threshold leaves layers of unequal density. Sparse kernels break even at 70 % sparsity.
- layer freezing: a front that grows from 10 to 90 % of the run, in 12 steps, to three quarters of the layers; frozen
  layers have no backward. Egeria's cache of activations is left out: frozen layers still run forward.
- sparse attention: 16384 tokens, h = 1024; what hashing keeps differs by layer (lognormal around 15 %, 0.8) and by
  iteration (0.25). Dense in the first tenth.
- early exit: tokens leave after every second layer from a quarter of the depth on; how many grows until a tenth is
  left at half depth. Those that leave take their part of the head there.
- mixture of depths: every second block takes 12.5 % of the tokens (arXiv 2404.02258), which is fixed.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from balancing.layers import LayerSeconds

__all__ = ["EXPERT_SHARE", "TRACES", "Trace", "trace"]

_FLOPS, _WORDS = 400e12, 32000
EXPERT_SHARE = 0.6  # of a layer with experts
_STATE_BYTES = 14  # a parameter: bf16 weight, fp32 main copy and two moments


@dataclass(frozen=True, eq=False)
class Trace:
    """Recorded costs of a run.

    costs: one LayerSeconds an iteration.
    parameters: [layer] at the start, with those of the embedding and of the head.
    layer_bytes: [layer], bytes that a move of the layer transfers.
    message_bytes: bytes of an activation between stages.
    weight_share: of a layer's backward that its weight gradient takes, where its attention is dense.
    """

    name: str
    costs: list[LayerSeconds]
    parameters: np.ndarray
    end_parameters: float
    layer_bytes: np.ndarray
    message_bytes: float
    weight_share: float = 0.5


@dataclass(frozen=True)
class _Model:
    layers: int
    hidden: int = 4096
    tokens: int = 2048

    @property
    def matrices(self) -> float:
        """Seconds of a layer's matrices, forward."""
        return 24 * self.hidden**2 * self.tokens / _FLOPS

    @property
    def attention(self) -> float:
        return 2 * self.tokens * self.hidden * self.tokens / _FLOPS

    @property
    def head(self) -> float:
        return 2 * self.hidden * _WORDS * self.tokens / _FLOPS

    def cost(
        self, matrices: np.ndarray, attention: np.ndarray, *, frozen: int = 0, extra: np.ndarray | float = 0.0,
        head: float = 1.0,
    ) -> LayerSeconds:  # fmt: skip
        """Shares of the dense layers' seconds. extra: forward seconds of heads inside; head: share of the last one."""
        live = np.arange(self.layers) >= frozen
        work, look = matrices * self.matrices, attention * self.attention
        last = head * self.head
        return LayerSeconds(work + look + extra, 2 * (work + look + extra) * live, (0.0, 0.0), (last, 2 * last))


def _experts(model: _Model, iterations: int, draw: np.random.Generator) -> list[LayerSeconds]:
    fullest, ones = draw.uniform(1.28, 2.43, model.layers), np.ones(model.layers)
    costs, drift = [], np.zeros(model.layers)
    for _ in range(iterations):
        drift = 0.98 * drift + 0.05 * draw.standard_normal(model.layers)
        ratio = np.maximum(1 + (fullest - 1) * np.exp(drift + 0.1 * draw.standard_normal(model.layers)), 1)
        costs.append(model.cost(1 - EXPERT_SHARE + EXPERT_SHARE * ratio, ones))
    return costs


def _pruning(model: _Model, iterations: int, draw: np.random.Generator) -> list[LayerSeconds]:
    scale = np.exp(0.35 * draw.standard_normal(model.layers) + np.linspace(-0.3, 0.3, model.layers))
    sample = np.abs(np.random.default_rng(0).standard_normal(4000))
    magnitude = scale[:, None] * sample  # Gaussian weights of each layer
    costs = []
    for at in np.linspace(0, 1, iterations):
        step = np.floor(np.clip((at - 0.3) / 0.4, 0, 1) * 5) / 5
        sparsity = 0.9 * (1 - (1 - step) ** 3)
        density = (magnitude >= np.quantile(magnitude, sparsity)).mean(1) if sparsity else np.ones(model.layers)
        noise = 1 + 0.01 * draw.standard_normal(model.layers)
        costs.append(model.cost(np.minimum(1.0, 0.03 + density / 0.3) * noise, np.ones(model.layers)))
    return costs


def _freezing(model: _Model, iterations: int, draw: np.random.Generator) -> list[LayerSeconds]:
    costs = []
    for at in np.linspace(0, 1, iterations):
        share = 0.75 * np.floor(np.clip((at - 0.1) / 0.8, 0, 1) * 12) / 12
        noise = 1 + 0.01 * draw.standard_normal(model.layers)
        costs.append(model.cost(noise, noise, frozen=round(share * model.layers)))
    return costs


def _sparse(model: _Model, iterations: int, draw: np.random.Generator) -> list[LayerSeconds]:
    kept = 0.15 * np.exp(0.8 * draw.standard_normal(model.layers))
    costs = []
    for at in np.linspace(0, 1, iterations):
        density = np.minimum(kept * np.exp(0.25 * draw.standard_normal(model.layers)) + 0.02, 1.0)
        costs.append(model.cost(np.ones(model.layers), density if at > 0.1 else np.ones(model.layers)))
    return costs


def _exit(model: _Model, iterations: int, draw: np.random.Generator) -> list[LayerSeconds]:
    depth = np.arange(model.layers + 1) // 2 * 2 / model.layers
    costs = []
    for at in np.linspace(0, 1, iterations):
        rate = np.log(10) / 0.25 * np.clip(at / 0.6, 0, 1) * (1 + 0.03 * draw.standard_normal())
        left = np.exp(-rate * np.maximum(depth - 0.25, 0))  # [layer + 1], tokens that reach a layer
        share = left[:-1] * (1 + 0.01 * draw.standard_normal(model.layers))
        leaving = np.maximum(left[:-1] - left[1:], 0.0) * model.head
        costs.append(model.cost(share, share, extra=leaving, head=float(left[-1])))
    return costs


def _depths(model: _Model, iterations: int, draw: np.random.Generator) -> list[LayerSeconds]:
    share = np.where(np.arange(model.layers) % 2 == 0, 1.0, 0.125)
    return [
        model.cost(noise * share, noise * share**2)
        for noise in (1 + 0.01 * draw.standard_normal((iterations, model.layers)))
    ]


TRACES: dict[str, tuple[Callable[[_Model, int, np.random.Generator], list[LayerSeconds]], float]] = {
    "mixture of experts": (_experts, 1.23),
    "gradual pruning": (_pruning, 3.18),
    "layer freezing": (_freezing, 2.23),
    "sparse attention": (_sparse, 4.02),
    "early exit": (_exit, 4.52),
    "mixture of depths": (_depths, 1.17),
}  # and DynMo's "up to" speedup over static partitions


def trace(name: str, layers: int, iterations: int, seed: int = 0) -> Trace:
    """The costs of one kind of model. Raises KeyError for an unknown name."""
    make, _ = TRACES[name]
    model = _Model(layers, 1024, 16384) if name == "sparse attention" else _Model(layers)
    parameters = np.full(layers, 12.0 * model.hidden**2)
    return Trace(
        name,
        make(model, iterations, np.random.default_rng(seed)),
        parameters,
        float(_WORDS * model.hidden),
        _STATE_BYTES * parameters,
        2.0 * model.tokens * model.hidden,
        model.matrices / (model.matrices + model.attention) / 2,
    )

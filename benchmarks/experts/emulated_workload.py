"""Workload of the emulated experts: machine, model sizes and loads, and their scale.

The model has nodes with A800s, two to a NIC of 200 Gbit/s (`Cluster.sheet("a800-4x200g")`), experts of Mixtral 8x7B's
size, 8192 tokens a rank and micro-batch, top-2, and attention with four square projections. The emulation has

- fewer bytes: one token stands for 32, with 64 float32 values for 32 x 4096 bf16 values. That is a factor of 1024;
  weights (bf16) and gradients (float32) of experts are smaller by the same factor;
- more time: one factor on all compute, such that a rank's mean expert compute in a micro-batch and layer takes tens of
  milliseconds. The bandwidth of a NIC is the modelled one over both factors.

So compute, NIC time of tokens and NIC time of replicas keep their proportions.

Grouped matrix products compute the rows of each expert in tiles, the last of which is not full. Evenly spread tokens
fill theirs; uneven ones leave half a tile a home expert or replica empty. Not modelled: waves of tiles that do not fill
all multiprocessors, which weigh the less the more tiles there are.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from balancing.cluster import Cluster
from balancing.experts import ExpertShape
from balancing_tools.load_trace import LoadTrace
from benchmarks.experts.synthetic import drifted, sampled_load, zipf_popularity

__all__ = ["HIDDEN", "SHAPE", "TOP_K", "Loads", "Scale", "made_up_loads", "recorded_loads", "scaled_load"]

SHAPE = ExpertShape(hidden=4096, ffn_hidden=14336, bytes_per_parameter=2)
TOP_K = 2
HIDDEN = 64  # emulated
_TOKENS = 8192  # of a rank and micro-batch, one sequence
_ASSIGNMENTS = 512  # emulated tokens x top-k of a rank and micro-batch
_TILE_ROWS = 128  # of a bf16 matrix product, as cuBLAS and CUTLASS choose for large ones
_IMBALANCE = (1.5, 2.0, 3.0, 4.0)  # of synthetic loads, layer by layer
_DRIFT = 0.05  # of synthetic loads, from one iteration to the next


@dataclass(frozen=True)
class Scale:
    """The modelled machine and its scale.

    ranks: number of ranks.
    experts: number of experts of a layer.
    expert_seconds: emulated forward compute of a rank's mean load in one layer and micro-batch.
    nodes: that the ranks are on.

    Raises ValueError for too many experts, and where their number does not divide by the ranks.
    """

    ranks: int
    experts: int
    expert_seconds: float
    nodes: int = 2

    def __post_init__(self) -> None:
        if self.experts % self.ranks or self.experts > _ASSIGNMENTS:
            raise ValueError(
                f"{self.experts} experts cannot be emulated on {self.ranks} ranks: their number must divide by the "
                f"ranks and be at most {_ASSIGNMENTS}"
            )

    @property
    def per_node(self) -> int:
        """Ranks of a node."""
        return self.ranks // self.nodes

    @property
    def cluster(self) -> Cluster:
        """The part of the modelled nodes that the ranks use."""
        return Cluster.sheet("a800-4x200g").relabel(self.nodes, self.per_node)

    @property
    def assignments(self) -> int:
        """Emulated tokens x top-k of a rank and micro-batch, a multiple of the experts."""
        return self.experts * (_ASSIGNMENTS // self.experts)

    @property
    def tokens(self) -> float:
        """Modelled tokens for each emulated one."""
        return _TOKENS * TOP_K / self.assignments

    @property
    def tile(self) -> int:
        """Emulated tokens that fill a tile of an expert's matrix products."""
        return max(1, round(_TILE_ROWS / self.tokens))

    @property
    def bytes(self) -> float:
        """Modelled bytes for each emulated one."""
        return self.tokens * SHAPE.hidden * SHAPE.bytes_per_parameter / (4 * HIDDEN)

    @property
    def time(self) -> float:
        """Emulated seconds for each modelled one."""
        return self.expert_seconds / (_TOKENS * TOP_K * SHAPE.forward_seconds(self.cluster))

    @property
    def attention_seconds(self) -> float:
        """Modelled forward seconds of a layer's attention: four projections and the causal half of its scores."""
        return _TOKENS * SHAPE.hidden * (8 * SHAPE.hidden + 2 * _TOKENS) / self.cluster.flops

    @property
    def nic(self) -> float:
        """Emulated bytes/s of a NIC."""
        return self.cluster.nic_bandwidth / (self.bytes * self.time)


@dataclass(frozen=True)
class Loads:
    """Emulated tokens, int64 [step, source_rank, layer, micro_batch, expert].

    now: loads of each step.
    before: loads of the iteration before, from which replicas are placed.
    """

    now: np.ndarray
    before: np.ndarray

    @property
    def even(self) -> "Loads":
        """The same numbers of tokens, spread equally over experts."""
        return Loads(_even(self.now), _even(self.before))


def _even(load: np.ndarray) -> np.ndarray:
    total = load.sum(-1, keepdims=True)
    assert (total % load.shape[-1] == 0).all(), "the tokens do not divide by the experts"
    return np.broadcast_to(total // load.shape[-1], load.shape).copy()


def scaled_load(counts: np.ndarray, total: int, most: int) -> np.ndarray:
    """Scale `counts` [..., expert] to the sum `total` with none above `most`, by largest remainders: int64.

    Counts that are all zero become equal.
    """
    flat = np.asarray(counts, dtype=np.float64).reshape(-1, counts.shape[-1])
    assert total <= most * flat.shape[1], "the limit leaves too little room"
    scaled = np.empty(flat.shape, dtype=np.int64)
    for at, row in enumerate(flat):
        row = row if row.any() else np.ones_like(row)
        share = row / row.sum() * total
        whole = np.minimum(np.floor(share), most).astype(np.int64)
        while missing := total - int(whole.sum()):
            room = whole < most
            order = np.argsort(-np.where(room, share - whole, -np.inf), kind="stable")
            whole[order[: min(missing, int(room.sum()))]] += 1
        scaled[at] = whole
    return scaled.reshape(counts.shape)


def recorded_loads(trace: LoadTrace, scale: Scale, layers: int, micro_batches: int, steps: int) -> Loads:
    """Loads of a trace: records spread over the run, each close to the one before, and layers spread over the model.

    trace: the recorded loads.
    scale: the emulated machine.
    layers, micro_batches, steps: numbers of each that are wanted.

    Raises ValueError where the trace is too small, and where its source ranks cannot be mapped to the ranks.
    """
    counts = trace.on_ranks(scale.ranks)
    _, _, its_layers, its_batches, _ = counts.shape
    apart = np.diff(trace.iteration)
    following = 1 + np.flatnonzero(apart == apart.min()) if len(apart) else np.array([])
    if len(following) < steps or its_layers < layers or its_batches < micro_batches:
        raise ValueError(
            f"the trace has {len(counts)} records of {its_layers} layers and {its_batches} micro-batches; it must have "
            f"more than {steps} at equal distances, {layers} layers and {micro_batches} micro-batches"
        )
    now = following[_spread(len(following), steps)]
    counts = counts[:, :, _spread(its_layers, layers), :micro_batches]
    assignments, most = scale.assignments, scale.assignments // TOP_K
    return Loads(*(scaled_load(counts[at], assignments, most) for at in (now, now - 1)))


def _spread(length: int, number: int) -> np.ndarray:
    """Middles of `number` equal parts of 0 to length - 1."""
    return ((np.arange(number) + 0.5) * length / number).astype(int)


def made_up_loads(
    scale: Scale,
    layers: int,
    micro_batches: int,
    steps: int,
    imbalance: Sequence[float] = _IMBALANCE,
    drift: float = _DRIFT,
) -> Loads:
    """Synthetic loads (`benchmarks.experts.synthetic`) by Zipf's law.

    imbalance: of layers, in turn.
    drift: share of the tokens that change experts from one step to the next.
    """
    rng = np.random.default_rng(0)
    ranks = scale.ranks
    popularity = [
        zipf_popularity(scale.experts, ranks, min(imbalance[at % len(imbalance)], 0.9 * ranks), rng)
        for at in range(layers)
    ]
    drawn = np.empty((steps + 1, ranks, layers, micro_batches, scale.experts))
    for step, layer in np.ndindex(steps + 1, layers):
        if step:
            popularity[layer] = drifted(popularity[layer], drift, rng)
        for batch in range(micro_batches):
            drawn[step, :, layer, batch] = sampled_load(popularity[layer], ranks, _TOKENS * TOP_K, rng)
    loads = scaled_load(drawn, scale.assignments, scale.assignments // TOP_K)
    return Loads(loads[1:], loads[:-1])

"""Cost model of an MoE layer in seconds, and the number of tokens from which a replica pays for its transfer.

Pro-Prophet's performance model (arXiv 2411.10003, section IV, Eq. 1 to 8) has one bandwidth, the mean over all links.
Real clusters have two: the ranks of a node communicate over NVLink or PCIe, and nodes communicate over NICs, which
ranks may share. Here an all-to-all is a table of bytes from rank to rank. It takes as long as its busiest link; within
one node of equal links that is the paper's model.

With measured rates (`Cluster.rates`) a rank's experts take as long as its tokens and some more rows for each expert
that it computes, homes and replicas alike, or as long as the host needs to start the products of each.

A layer takes four all-to-alls (two forward, two backward), expert compute forward and twice that backward, and the
exposed part of the replicas' transfers: weights out (Trans) and gradients back (Agg). Hidden transfers cost time, too:
a transfer and an all-to-all that use a link at the same time each get half of its bandwidth.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from balancing.cluster import Cluster
from balancing.cluster.links import exchange_seconds, link_seconds, node_masks
from balancing.experts.placement import ReplicaPlacement

__all__ = [
    "ExpertShape",
    "MoELayerCost",
    "TransferWindow",
    "break_even_tokens",
    "copy_seconds",
    "layer_cost",
    "with_transfers",
]


_PRODUCTS = 2  # of an expert, forward


@dataclass(frozen=True)
class ExpertShape:
    """Size of one expert, an MLP.

    hidden: input and output width.
    ffn_hidden: inner width.
    bytes_per_parameter: bytes of a weight, and of one element of a token's activation, when sent; 2 for bf16.
    gated: whether there is a third matrix, as in SwiGLU.
    gradient_bytes: bytes of one parameter's gradient when sent; 4 for float32, 0 for experts that do not train.

    Raises ValueError for sizes that are not positive.
    """

    hidden: int
    ffn_hidden: int
    bytes_per_parameter: float
    gated: bool = True
    gradient_bytes: float = 4.0

    def __post_init__(self) -> None:
        for name in ("hidden", "ffn_hidden", "bytes_per_parameter"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)!r} must be positive")
        if not self.gradient_bytes >= 0:
            raise ValueError(f"gradient_bytes={self.gradient_bytes!r} must be 0 or more")

    @property
    def parameters(self) -> int:
        """Number of parameters of one expert, without biases."""
        return (3 if self.gated else 2) * self.hidden * self.ffn_hidden

    @property
    def weight_bytes(self) -> float:
        """Bytes of one expert's weights."""
        return self.parameters * self.bytes_per_parameter

    def forward_seconds(self, cluster: Cluster) -> float:
        """Seconds of forward compute for one token on one rank. Backward takes twice as long."""
        return 2 * self.parameters / (cluster.flops if cluster.rates is None else cluster.rates.grouped.flops)

    def rank_seconds(self, tokens: Any, experts: Any, cluster: Cluster) -> Any:
        """Seconds of a rank's forward compute; numbers, or arrays of one shape. Backward takes twice as long.

        tokens: that the rank computes.
        experts: number of experts that it computes them with.
        """
        if cluster.rates is None:
            return tokens * self.forward_seconds(cluster)
        device = cluster.rates.grouped.seconds(tokens, experts, 2 * self.parameters)
        return np.maximum(device, _PRODUCTS * experts * cluster.rates.group_seconds)


@dataclass(frozen=True)
class TransferWindow:
    """The compute that overlaps the transfers of a layer's replicas, and how many micro-batches a transfer serves.

    hidden_under: seconds of forward compute outside the experts that overlaps the transfers (T_FNEC; twice that
        backward). Expert compute then overlaps them, too (Eq. 8). None for exposed transfers (Eq. 6).
    first: whether this is the first MoE layer. No expert compute overlaps its transfers: its weights are sent before
        those of all other layers, its gradients after those of all other layers.
    micro_batches: number of micro-batches that one transfer serves; more than one with resident slots.
    """

    hidden_under: float | None = None
    first: bool = False
    micro_batches: int = 1


@dataclass(frozen=True)
class MoELayerCost:
    """Seconds of one MoE layer and micro-batch, forward and backward, on the slowest rank or link.

    all_to_all: one of the four all-to-alls of tokens.
    forward: expert compute forward; backward is twice that.
    trans, agg: transfer of the replicas' weights, and of their gradients.
    trans_exposed, agg_exposed: the part of these transfers that no compute hides.
    slowed: delay of the all-to-alls by hidden transfers on the same links.
    micro_batches: number of micro-batches that one transfer serves.
    """

    all_to_all: float
    forward: float
    trans: float
    agg: float
    trans_exposed: float
    agg_exposed: float
    slowed: float = 0.0
    micro_batches: int = 1

    @property
    def exposed(self) -> float:
        """Seconds of exposed transfers per micro-batch that they serve."""
        return (self.trans_exposed + self.agg_exposed) / self.micro_batches

    @property
    def total(self) -> float:
        """Seconds by Eq. 6 if transfers are exposed, otherwise by Eq. 8 plus the delay of the all-to-alls."""
        return 4 * self.all_to_all + 3 * self.forward + self.exposed + self.slowed / self.micro_batches


def layer_cost(
    tokens: np.ndarray,
    placement: ReplicaPlacement,
    cluster: Cluster,
    shape: ExpertShape,
    window: TransferWindow = TransferWindow(),
) -> MoELayerCost:
    """The cost of one layer and micro-batch.

    tokens: int [source_rank, rank], tokens sent from rank to rank (`balancing.experts.split.split.traffic`).
    placement: the replicas. Rank i of the placement is rank i of the cluster.
    cluster: compute and link speeds.
    shape: size of an expert.
    window: the compute that overlaps the transfers.
    """
    computed = tokens.sum(0)
    if cluster.rates is None:
        forward = int(computed.max()) * shape.forward_seconds(cluster)
    else:
        experts = placement.homes_per_rank + (placement.slot_expert >= 0).sum(1)
        forward = float(shape.rank_seconds(computed, experts, cluster).max())
    all_to_all = exchange_seconds(tokens * float(shape.hidden * shape.bytes_per_parameter), cluster)
    return with_transfers(all_to_all, forward, copy_seconds(placement, cluster), shape, window)


def with_transfers(
    all_to_all: Any, forward: Any, copied: Any, shape: ExpertShape, window: TransferWindow
) -> MoELayerCost:
    """`layer_cost` from known seconds. They are numbers, or arrays of one shape with an entry per layer or placement.

    all_to_all: seconds of one all-to-all of tokens.
    forward: seconds of expert compute in the forward pass.
    copied: `copy_seconds` of the placement.
    shape, window: as in `layer_cost`.
    """
    trans, agg = copied * shape.weight_bytes, copied * shape.parameters * shape.gradient_bytes
    hidden, slowed = 0.0, 0.0
    if window.hidden_under is not None:
        hidden = window.hidden_under + (0.0 if window.first else forward)
        busy = 4 * all_to_all + 3 * (forward + window.hidden_under)
        exchanging = 4 * all_to_all / np.maximum(busy, np.finfo(float).tiny)  # fraction of the time in all-to-alls
        # During that fraction a transfer has half the bandwidth, so it takes 1 / (1 - exchanging / 2) times as long.
        slowed = (trans + agg) * exchanging / (2 - exchanging)
    return MoELayerCost(
        all_to_all=all_to_all,
        forward=forward,
        trans=trans,
        agg=agg,
        trans_exposed=np.maximum(0.0, trans - hidden),
        agg_exposed=np.maximum(0.0, agg - 2 * hidden),
        slowed=slowed,
        micro_batches=window.micro_batches,
    )


def copy_seconds(placement: ReplicaPlacement, cluster: Cluster) -> float:
    """Seconds to send all replicas, per byte of an expert. The same for weights and for gradients, since links are
    equally fast in both directions.

    Ranks relay weights along `ReplicaPlacement.hops`, in pieces, so that a home sends each expert once, however many
    replicas the expert has (`balancing.experts.engine.slots`).
    """
    _, source, rank = placement.hops.T
    ranks = placement.num_ranks
    _, outside = node_masks(cluster, ranks)
    ends = np.concatenate([source, ranks + rank])
    crosses = outside[source, rank]
    far = np.bincount(ends, weights=np.concatenate([crosses, crosses]), minlength=2 * ranks)
    near = np.bincount(ends, minlength=2 * ranks) - far
    return float(link_seconds(near.reshape(2, ranks), far.reshape(2, ranks), cluster).max())


def break_even_tokens(
    cluster: Cluster,
    shape: ExpertShape,
    *,
    same_node: bool,
    backward: bool = True,
    sends: int | None = None,
    hidden_under: float = 0.0,
    micro_batches: int = 1,
) -> float:
    """Tokens of a micro-batch that a replica must serve so that it saves as many seconds of compute as its exposed
    transfers take, and, with measured rates, as the rank of the replica needs for one more expert.

    cluster: compute and link speeds.
    shape: size of an expert.
    same_node: whether the replica is in the home's node.
    backward: whether the layer is trained, so that gradients are returned.
    sends: how often weights are sent; by default twice in training (shared slots are filled again for the backward
        pass), else once.
    hidden_under: seconds of forward compute that overlap this replica's transfers, twice that backward; 0 for exposed
        transfers. The replicas of a rank share this time. With one rate, the result is 0 if the transfers fit into
        this time.
    micro_batches: number of micro-batches that one transfer serves.
    """
    sends = (2 if backward else 1) if sends is None else sends
    bandwidth = cluster.intra_node_bandwidth if same_node else cluster.nic_bandwidth * len(cluster.nics(0))
    copied = sends * shape.weight_bytes + (shape.parameters * shape.gradient_bytes if backward else 0)
    window = hidden_under * (3 if backward else 1)
    saved = (3 if backward else 1) * micro_batches * shape.forward_seconds(cluster)
    rows = 0.0 if cluster.rates is None else cluster.rates.grouped.group
    return max(0.0, copied / bandwidth - window) / saved + rows

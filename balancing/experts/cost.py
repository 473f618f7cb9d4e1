"""What a layer of experts costs in seconds, and when a replica pays for its copy.

Pro-Prophet's performance model (arXiv 2411.10003, section IV, Eq. 1 to 8) knows one bandwidth, the mean over all links.
Machines have two: ranks of a node talk over NVLink or PCIe, nodes over NICs, which some ranks may share. Here every
exchange is a table of bytes from rank to rank, and takes as long as its busiest link; within one node of equal links
that is the paper's model. A layer takes four all-to-alls (two forward, two backward), expert compute forward and twice
that backward, and the transfers of replicas: weights out (Trans) and gradients home (Agg), as far as nothing hides
them. Hidden transfers are not free either: where they meet an all-to-all on a link, each gets half of it.
"""

from dataclasses import dataclass

import numpy as np

from balancing.cluster import Cluster
from balancing.cluster.links import exchange_seconds, link_seconds, node_masks
from balancing.experts.placement import ReplicaPlacement

__all__ = [
    "ExpertShape",
    "LayerCost",
    "break_even_tokens",
    "copy_seconds",
    "layer_cost",
    "with_transfers",
]


@dataclass(frozen=True)
class ExpertShape:
    """The size of one expert: an MLP from `hidden` to `ffn_hidden` and back.

    bytes_per_parameter: of weights and of activations as they travel, 2 for bf16.
    gated: with a third matrix, as in SwiGLU.
    gradient_bytes: bytes per parameter of gradients as they travel home, 4 for float32.

    Raises ValueError for what is not positive.
    """

    hidden: int
    ffn_hidden: int
    bytes_per_parameter: float
    gated: bool = True
    gradient_bytes: float = 4.0

    def __post_init__(self) -> None:
        for name in ("hidden", "ffn_hidden", "bytes_per_parameter", "gradient_bytes"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)!r} must be positive")

    @property
    def parameters(self) -> int:
        """Parameters of one expert, biases left out."""
        return (3 if self.gated else 2) * self.hidden * self.ffn_hidden

    @property
    def weight_bytes(self) -> float:
        """Bytes of one expert's weights."""
        return self.parameters * self.bytes_per_parameter

    def forward_seconds(self, cluster: Cluster) -> float:
        """Seconds one rank computes for one token, forward. Backward takes twice as long."""
        return 2 * self.parameters / cluster.flops


@dataclass(frozen=True)
class LayerCost:
    """Seconds of one MoE layer and micro-batch, forward and backward, on the rank or link that takes longest.

    all_to_all: one of the four exchanges of tokens. forward: expert compute; backward is twice that. trans, agg:
    transfers of replicas' weights and gradients; trans_exposed, agg_exposed: what of them nothing hides; slowed: by how
    much the hidden ones hold up tokens. micro_batches: how many one transfer serves.
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
        """Seconds of transfers that nothing hides, as far as this micro-batch has to bear them."""
        return (self.trans_exposed + self.agg_exposed) / self.micro_batches

    @property
    def total(self) -> float:
        """Eq. 6 where transfers are exposed; Eq. 8, and what they hold up, where compute hides them."""
        return 4 * self.all_to_all + 3 * self.forward + self.exposed + self.slowed / self.micro_batches


def layer_cost(
    tokens: np.ndarray,
    placement: ReplicaPlacement,
    cluster: Cluster,
    shape: ExpertShape,
    *,
    hidden_under: float | None = None,
    first: bool = False,
    micro_batches: int = 1,
    relayed: bool = True,
) -> LayerCost:
    """The cost of one layer and micro-batch.

    tokens: int [source_rank, rank], how many go where (`balancing.experts.split.split.traffic`). Rank i of the
    placement is rank i of the cluster.
    hidden_under: seconds of forward compute other than the experts' that run while replicas travel (T_FNEC; twice that
    backward). The experts' own compute hides transfers too then (Eq. 8). None if transfers wait (Eq. 6).
    first: whether the layer is the first one with experts, so that none compute while its replicas travel: its weights
    come before all others, and its gradients go home last.
    micro_batches: how many one transfer serves; more than one where slots stay resident through an iteration.
    relayed: as in `copy_seconds`.
    """
    forward = int(tokens.sum(0).max()) * shape.forward_seconds(cluster)
    all_to_all = exchange_seconds(tokens * (shape.hidden * shape.bytes_per_parameter), cluster)
    return with_transfers(all_to_all, forward, placement, cluster, shape, relayed, hidden_under, first, micro_batches)


def with_transfers(
    all_to_all: float,
    forward: float,
    placement: ReplicaPlacement,
    cluster: Cluster,
    shape: ExpertShape,
    relayed: bool,
    hidden_under: float | None,
    first: bool,
    micro_batches: int,
) -> LayerCost:
    """The cost where one exchange of tokens takes `all_to_all` seconds and compute `forward`; else as `layer_cost`."""
    copy = copy_seconds(placement, cluster, relayed=relayed)
    trans, agg = copy * shape.weight_bytes, copy * shape.parameters * shape.gradient_bytes
    window, slowed = 0.0, 0.0
    if hidden_under is not None:
        window = hidden_under if first else forward + hidden_under
        busy = 4 * all_to_all + 3 * (forward + hidden_under)
        exchanging = 4 * all_to_all / busy if busy else 0.0  # share of the time in which tokens travel
        # Then a transfer goes at half its rate, and so do they: it takes 1 / (1 - exchanging / 2) of its time.
        slowed = (trans + agg) * exchanging / (2 - exchanging)
    return LayerCost(
        all_to_all=all_to_all,
        forward=forward,
        trans=trans,
        agg=agg,
        trans_exposed=max(0.0, trans - window),
        agg_exposed=max(0.0, agg - 2 * window),
        slowed=slowed,
        micro_batches=micro_batches,
    )


def copy_seconds(placement: ReplicaPlacement, cluster: Cluster, *, relayed: bool = True) -> float:
    """Seconds that all copies take for each byte of an expert: out or back, since links are as fast in both directions.

    relayed: ranks hand weights on along `ReplicaPlacement.hops`, in pieces, so that a home sends each expert once
    however many replicas it has; `balancing.experts.engine.slots` does so. Otherwise the home sends every replica
    itself.
    """
    expert, source, rank = placement.hops.T
    source, ranks = source if relayed else placement.home[expert], placement.num_ranks
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
    """Tokens a micro-batch that a replica must take over so that the compute they save outlasts its exposed copy.

    same_node: whether the copy stays in the node. backward: whether the layer is trained; then the gradients come home
    too. sends: how often the weights travel; by default twice in training (slots shared by layers are filled again for
    the backward) and once without. hidden_under: seconds of other compute in one pass, forward and, doubled, backward,
    under which copies travel; 0 for exposed copies. What remains for hidden copies is 0 once they fit. A rank's
    replicas share the window: pass the part of one. micro_batches: how many one copy serves.
    """
    sends = (2 if backward else 1) if sends is None else sends
    bandwidth = cluster.intra_node_bandwidth if same_node else cluster.nic_bandwidth * len(cluster.nics(0))
    copied = sends * shape.weight_bytes + (shape.parameters * shape.gradient_bytes if backward else 0)
    window = hidden_under * (3 if backward else 1)
    saved = (3 if backward else 1) * micro_batches * shape.forward_seconds(cluster)
    return max(0.0, copied / bandwidth - window) / saved

"""CUDA graphs together with replicas of experts.

A graph repeats the kernels that it captured, with the same addresses and shapes and without any Python. With
`--cuda-graph-impl transformer_engine`, graphs may contain attention, dense layers and routers. They cannot contain what
follows the router: each micro-batch is split over the instances of its experts, the host plans from its load, and
transfers of replicas start there.

With `--cuda-graph-impl full_iteration`, one graph holds all forward and backward passes of an iteration. It contains
the split of each micro-batch, since the device computes it, and the transfers of replicas. The host decides the
placement, so the graph repeats the one that it was captured with. So the placement changes only every plan_interval
iterations. If it has changed, the graph is captured again, which costs the --cuda-graph-warmup-steps iterations that
Megatron-LM runs without a graph before a capture.
"""

from collections.abc import Iterable
from typing import Any

from balancing.experts.split.placed_split import kernels_split

__all__ = ["check_kernels"]


def check_kernels(layers: Iterable[Any]) -> None:
    """Raise ValueError if the host would split the tokens of a layer, which a graph of iterations cannot contain.

    layers: MoE layers with replicas (`BalancedMoELayer`), complete and on their device.
    """
    if not all(kernels_split(layer.placement, layer.device) for layer in layers):
        raise ValueError(
            "--balance-experts with --cuda-graph-impl full_iteration splits tokens with Triton's kernels, which do not "
            "work here (a warning says why); use --cuda-graph-impl none"
        )

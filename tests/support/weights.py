"""The weights and gradients of ranks that hold other layers in another run, under names that do not depend on where
layers are, and what two runs are compared by.

A balancer adds up the same gradients in another order. They may differ by the rounding of float64, 1e-15 of their norm.
Adam divides each element by its own size, sqrt(v) + eps. Where a gradient is below eps, it multiplies the difference by
lr / eps. With Megatron-LM's eps of 1e-8 and a learning rate of 1e-2 that is a million, and makes 5e-18 into 5e-12.
Which element is so small depends on the processor's kernels. Runs whose weights are compared train with ADAM_EPS, or
with SGD and momentum: the factor is then 100 at most, and only a wrong gradient exceeds 1e-12 of the largest weight.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

__all__ = ["ADAM_EPS", "assert_same_gradients", "assert_same_weights", "named_weights"]

ADAM_EPS = 1e-4


def named_weights(chunks: Sequence[Any], gradients: bool = False) -> dict[str, np.ndarray]:
    """Of this rank's model chunks, unwrapped: layers by their number in the model, experts by their rank.

    gradients: those in the buffers of DistributedDataParallel instead, copied, since the next step overwrites them.
    """
    from megatron.core import parallel_state

    found, rank = {}, parallel_state.get_expert_model_parallel_rank()
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            if name.startswith("decoder.layers."):
                _, _, place, rest = name.split(".", 3)
                name = f"{chunk.decoder.layers[int(place)].layer_number}.{rest}"
            of = "" if getattr(parameter, "allreduce", True) else f" of {rank}"
            tensor = parameter.main_grad.clone() if gradients else parameter.detach()
            found[name + of] = (tensor.float() if tensor.element_size() == 2 else tensor).numpy()
    return found


def _of_all(ranks: Iterable[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    return {name: value for of_rank in ranks for name, value in of_rank.items()}


def assert_same_gradients(found: Iterable[dict[str, np.ndarray]], expected: Iterable[dict[str, np.ndarray]]) -> None:
    """Raise AssertionError unless all ranks together have equal gradients: to 1e-12, in norm."""
    gradients, others = _of_all(found), _of_all(expected)
    assert gradients.keys() == others.keys()
    for name, value in others.items():
        difference = np.linalg.norm(gradients[name] - value)
        assert difference <= 1e-12 * np.linalg.norm(value), f"{name} differs by {difference:.2g}"


def assert_same_weights(
    found: Iterable[dict[str, np.ndarray]], expected: Iterable[dict[str, np.ndarray]], tolerance: float = 1e-12
) -> None:
    """Raise AssertionError unless all ranks together have equal weights, by the largest element of each."""
    weights, others = _of_all(found), _of_all(expected)
    assert weights.keys() == others.keys()
    for name, value in others.items():
        np.testing.assert_allclose(weights[name], value, rtol=0, atol=tolerance * np.abs(value).max(), err_msg=name)

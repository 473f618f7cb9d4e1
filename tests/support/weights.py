"""The weights of ranks that hold other layers in another run, under names that do not depend on where layers are."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

__all__ = ["assert_same_weights", "named_weights"]


def named_weights(chunks: Sequence[Any]) -> dict[str, np.ndarray]:
    """Of this rank's model chunks, unwrapped: layers by their number in the model, experts by their rank."""
    from megatron.core import parallel_state

    found, rank = {}, parallel_state.get_expert_model_parallel_rank()
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            if name.startswith("decoder.layers."):
                _, _, place, rest = name.split(".", 3)
                name = f"{chunk.decoder.layers[int(place)].layer_number}.{rest}"
            of = "" if getattr(parameter, "allreduce", True) else f" of {rank}"
            tensor = parameter.detach()
            found[name + of] = (tensor.float() if tensor.element_size() == 2 else tensor).numpy()
    return found


def assert_same_weights(
    found: Iterable[dict[str, np.ndarray]], expected: Iterable[dict[str, np.ndarray]], tolerance: float = 1e-12
) -> None:
    """Raise AssertionError unless all ranks together have equal weights, by the largest element of each."""
    weights, others = ({name: value for of_rank in run for name, value in of_rank.items()} for run in (found, expected))
    assert weights.keys() == others.keys()
    for name, value in others.items():
        np.testing.assert_allclose(weights[name], value, rtol=0, atol=tolerance * np.abs(value).max(), err_msg=name)

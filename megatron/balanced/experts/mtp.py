"""Layer spec of multi-token prediction (`--mtp-num-layers`), with the same modules as the decoder layers.

Megatron-LM derives it from its own layer spec, whatever layer spec the model was given.
"""

import functools
from collections.abc import Callable
from typing import Any

__all__ = ["with_the_models_modules"]


def with_the_models_modules(original: Callable) -> Callable:
    """Replaces `mtp_block_spec` for a model whose layer spec is a `megatron.balanced.model.LayerSpecs`."""

    @functools.wraps(original)
    def mtp_block_spec(config: Any, transformer_layer_spec: Any, vp_stage: int | None = None) -> Any:
        spec = original(config, transformer_layer_spec, vp_stage=vp_stage)
        for layer in spec.layer_specs if spec is not None else ():
            config.transformer_layer_spec.fill_in_prediction(layer)
        return spec

    return mtp_block_spec

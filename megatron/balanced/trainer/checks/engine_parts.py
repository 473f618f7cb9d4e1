"""The private attributes of Transformer Engine that balancers use, checked at start-up.

Replicas of grouped experts and moves of 8-bit layers read and set attributes outside its public interface. With a
version that lacks one, the first replica or the first move would fail hours into a run.
"""

import argparse
import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron.balanced.trainer.config import BalanceConfig

__all__ = ["PARTS", "Part", "check_engine"]

Condition = Callable[[argparse.Namespace, BalanceConfig], bool]


@dataclass(frozen=True)
class Part:
    """Names that balancers use of one object of Transformer Engine.

    target: "module:Class.attribute" below `transformer_engine.pytorch`.
    names: attributes of the object; of a function, the attributes and keys that its code has to mention.
    needed: whether a run uses them.
    who: what uses them, for the message.
    """

    target: str
    names: tuple[str, ...]
    needed: Condition
    who: str

    def missing(self) -> list[str]:
        """What the installed version lacks."""
        module, _, path = self.target.partition(":")
        try:
            owner = importlib.import_module(f"transformer_engine.pytorch.{module}")
            part = functools.reduce(getattr, path.split("."), owner)
        except (ImportError, AttributeError):
            return [self.target]
        has = _mentioned(part) if callable(part) else set(dir(part))
        return [f"{self.target} {name}" for name in self.names if name not in has]


def _mentioned(function: Any) -> set[str]:
    code = function.__code__
    constants = [each for each in code.co_consts if isinstance(each, str)]
    keys = [key for each in code.co_consts if isinstance(each, tuple) for key in each if isinstance(key, str)]
    return {*code.co_names, *code.co_varnames, *constants, *keys}


def _grouped(args: argparse.Namespace, config: BalanceConfig) -> bool:
    return config.experts.enabled and args.moe_grouped_gemm


def _in_8_bits(args: argparse.Namespace, config: BalanceConfig) -> bool:
    return bool((config.experts.enabled or config.layers.enabled) and args.fp8_param_gather)


def _delayed(args: argparse.Namespace, config: BalanceConfig) -> bool:
    return bool(config.layers.enabled and args.fp8 and args.fp8_recipe == "delayed")


_ROWS = ("rowwise_data", "rowwise_scale_inv")
_EXPERTS, _LAYERS = "replicas of grouped experts", "layers that move"
PARTS = (
    Part("module.grouped_linear:GroupedLinear.__init__", ("num_gemms", "use_bias", "fuse_wgrad_accumulation"),
         _grouped, _EXPERTS),
    Part("module.base:TransformerEngineBaseModule.__init__",
         ("fp8_initialized", "fp8_meta", "fp8_meta_tensors_initialized", "quantizers"), _grouped, _EXPERTS),
    Part("tensor.float8_tensor:Float8Tensor.get_metadata", ("data", "fp8_scale_inv"), _in_8_bits, "weights in 8 bits"),
    Part("tensor.float8_blockwise_tensor:Float8BlockwiseQTensor.get_metadata", _ROWS, _in_8_bits, "weights in 8 bits"),
    Part("tensor.mxfp8_tensor:MXFP8Tensor.get_metadata", (*_ROWS, "columnwise_data", "columnwise_scale_inv"),
         _in_8_bits, "weights in 8 bits"),
    Part("module.base:TransformerEngineBaseModule.init_fp8_meta_tensors", (), _delayed, _LAYERS),
    Part("quantization:FP8GlobalStateManager.quantization_state",
         ("global_amax_buffer", "global_amax_history_buffer", "global_scale_buffer"), _delayed, _LAYERS),
)  # fmt: skip


def check_engine(args: argparse.Namespace, config: BalanceConfig) -> None:
    """Raise ValueError, in one line, if the installed Transformer Engine lacks an attribute that this run uses."""
    if args.transformer_impl != "transformer_engine":
        return
    for part in PARTS:
        if part.needed(args, config) and (missing := part.missing()):
            import transformer_engine

            version = getattr(transformer_engine, "__version__", "of unknown version")
            raise ValueError(
                f"Transformer Engine {version} lacks {missing[0]}, which {part.who} need; install 2.20.2, with which "
                "they are tested, or switch the balancer off"
            )

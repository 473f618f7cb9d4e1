"""The module that stands in for `transformer_engine_torch`, and how functions get into it.

Transformer Engine looks up many names of its C++ module while it is imported, so every name exists. A function without
a stand-in raises NotImplementedError with its name when it is called.
"""

import types
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["MODULE", "stands_in"]


class _CppModule(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def missing(*unused: Any, **also_unused: Any) -> Any:
            raise NotImplementedError(f"transformer_engine_torch.{name} has no stand-in on the CPU")

        setattr(self, name, missing)
        return missing


MODULE = _CppModule("transformer_engine_torch")
MODULE.__file__ = __file__  # which Transformer Engine asks for


def stands_in(function: Callable) -> Callable:
    """Put `function` into the module under its own name. As C++ does, it computes unseen by autograd."""
    computed = torch.no_grad()(function)
    setattr(MODULE, function.__name__, computed)
    return computed

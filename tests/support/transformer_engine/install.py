"""Import Transformer Engine without its libraries."""

import importlib
import importlib.util
import os
import sys
import types

from tests.support.packages_apart import add_to_path
from tests.support.transformer_engine.cpp_module import MODULE
from tests.support.transformer_engine.on_cpu import (
    answer_is_cuda,
    dequantize_where_it_is,
    gather_bytes,
    keep_mode_in_custom_ops,
)

__all__ = ["install"]

_PARTS = "activations attention context enums machine norms optimizer padding products quantized".split()


def install() -> None:
    """Have `import transformer_engine.pytorch` work in this process, for good. To be called after `use_cpu` and before
    megatron.core is imported, which looks for Transformer Engine once."""
    add_to_path("transformer_engine")
    for part in _PARTS:
        importlib.import_module(f"tests.support.transformer_engine.{part}")
    sys.modules[MODULE.__name__] = MODULE
    answer_is_cuda()
    keep_mode_in_custom_ops()
    gather_bytes()
    os.environ["NVTE_UNFUSED_FP8_UPDATE"] = "1"  # Transformer Engine's own Python updates the scales of delayed scaling
    os.environ["NVTE_PROJECT_BUILDING"] = "1"  # Transformer Engine loads no libraries then
    try:
        common = _common()
        importlib.import_module("transformer_engine.pytorch")
        sys.modules["transformer_engine"].common = common
        dequantize_where_it_is()
    finally:
        del os.environ["NVTE_PROJECT_BUILDING"]


def _common() -> types.ModuleType:
    """`transformer_engine.common`, which takes the C++ module for loaded. The package itself imports everything else
    right away, so an empty one is in its place for the moment."""
    spec = importlib.util.find_spec("transformer_engine")
    assert spec is not None and spec.submodule_search_locations is not None, "see packages_apart.why_missing"
    package = types.ModuleType("transformer_engine")
    package.__path__ = list(spec.submodule_search_locations)
    sys.modules["transformer_engine"] = package
    common = importlib.import_module("transformer_engine.common")
    common.load_framework_extension = lambda framework: None
    del sys.modules["transformer_engine"]
    return common

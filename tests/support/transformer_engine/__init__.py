"""Transformer Engine's own Python on a CPU.

The package `transformer_engine` is Python around one C++ module, `transformer_engine_torch`. `install` puts a module
made of torch in its place (`cpp_module.py`), so that the layers, the optimizer and the quantized tensors that
Megatron-LM takes from Transformer Engine run here: the same classes, parameters, states and checkpoints as on a GPU.
Its kernels do not run: rounding on tensor cores, fused attention and speed cannot be tested this way.

`scripts/environment.sh` installs the packages into a folder that only these tests put on their path: Megatron-LM takes
other defaults wherever Transformer Engine can be imported.
"""

from tests.support.transformer_engine.install import install

__all__ = ["install"]

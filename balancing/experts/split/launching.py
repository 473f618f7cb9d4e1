"""Launches of Triton kernels that cost the host little.

Triton finds the compiled kernel by all arguments, which takes longer than the launch. Here none is specialized
(`do_not_specialize`), so the kernel that the first launch has compiled fits all later ones with the same types and
constants.
"""

from typing import Any

import torch

__all__ = ["launch"]

_compiled: dict[tuple[Any, ...], Any] = {}  # False: launched by Triton


def launch(
    kernel: Any,
    grid: tuple[int, int],
    tensors: tuple[torch.Tensor, ...],
    sizes: tuple[int, ...],
    options: dict[str, Any],
) -> None:
    """Launch `kernel` on the device of the first tensor.

    tensors, sizes: its arguments, none of which it specializes. sizes: below 2^31.
    options: its constants, which are its last arguments, in their order; then compile options, if there are any.
    """
    key = id(kernel), tensors[0].device, *(x.dtype for x in tensors), *options.values()
    found = _compiled.get(key)
    with torch.cuda.device_of(tensors[0]):
        if found:
            try:
                constants = len(kernel.arg_names) - len(tensors) - len(sizes)
                return found[*grid, 1](*tensors, *sizes, *tuple(options.values())[:constants])
            except (AttributeError, TypeError):  # a Triton that launches compiled kernels otherwise
                found = False
        launched = kernel[grid](*tensors, *sizes, **options)  # None if it is interpreted
    _compiled[key] = launched if found is None else False

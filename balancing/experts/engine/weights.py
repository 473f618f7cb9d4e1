"""How the weights of an expert are stored and laid out in the buffers of replica slots.

An expert is sent as one flat tensor. Its parameters may be plain tensors, or quantized ones that consist of 8-bit
values and scales. The replica of a quantized parameter consists of the same parts, stored in the slot's buffer, and
equals the home parameter bit for bit.
"""

from collections.abc import Collection, Sequence

import torch

__all__ = ["GradientLayout", "Parameters", "WeightFormat", "WeightLayout", "aligned"]

Parameters = Sequence[torch.Tensor]  # the parameters of one expert, in a fixed order

_ALIGNMENT = 128  # bytes, if a buffer has tensors of several types; matrix products need 16


def aligned(size: int) -> int:
    """Bytes that `size` bytes take in a buffer with tensors of several types."""
    return -(-size // _ALIGNMENT) * _ALIGNMENT


class WeightFormat:
    """How parameters are stored. Here each parameter is one tensor. Subclasses store quantized parameters."""

    def parts(self, parameter: torch.Tensor) -> list[torch.Tensor]:
        """The tensors that are sent to a replica of `parameter`, in a fixed order."""
        return [parameter.detach()]

    def replica(self, parameter: torch.Tensor, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """An autograd leaf like `parameter`, stored in `parts`."""
        return torch.nn.Parameter(parts[0])

    def received(self, replicas: Parameters) -> None:
        """Called after the parts of `replicas` have been received."""


class WeightLayout:
    """The layout of an expert's parameters in a flat buffer.

    parameters: the parameters of one expert.
    format: how they are stored.
    """

    def __init__(self, parameters: Parameters, format: WeightFormat) -> None:
        self._format = format
        parts_by_parameter = [format.parts(p) for p in parameters]
        self._counts = [len(parts) for parts in parts_by_parameter]
        self._parts = [(part.shape, part.dtype) for parts in parts_by_parameter for part in parts]
        types = [dtype for _, dtype in self._parts]
        alike = len(set(types)) == 1
        self.dtype = types[0] if alike else torch.uint8
        self._used = [shape.numel() * dtype.itemsize // self.dtype.itemsize for shape, dtype in self._parts]
        self._sizes = self._used if alike else [aligned(used) for used in self._used]
        self.size = sum(self._sizes)  # elements of `dtype`
        self.nbytes = self.size * self.dtype.itemsize

    def flat(self, parameters: Parameters) -> torch.Tensor:
        """A copy of an expert's parameters, [size]."""
        parts = [part.reshape(-1) for p in parameters for part in self._format.parts(p)]
        parts = [part if part.dtype is self.dtype else part.view(self.dtype) for part in parts]
        return torch.cat(
            [
                part if used == size else torch.nn.functional.pad(part, (0, size - used))
                for part, used, size in zip(parts, self._used, self._sizes, strict=True)
            ]
        )

    def replicas(self, parameters: Parameters, flat: torch.Tensor) -> list[torch.Tensor]:
        """Autograd leaves like `parameters`, stored in `flat`, [size]."""
        pieces = zip(flat.split(self._sizes), self._used, self._parts, strict=True)
        parts = iter([piece[:used].view(dtype).view(shape) for piece, used, (shape, dtype) in pieces])
        return [
            self._format.replica(p, [next(parts) for _ in range(count)])
            for p, count in zip(parameters, self._counts, strict=True)
        ]


class GradientLayout:
    """The layout of an expert's gradients in a flat tensor. Parameters that no expert of the layer trains have none.

    parameters: the parameters of one expert.
    trained: places in `parameters` of those that some expert of the layer trains.
    """

    def __init__(self, parameters: Parameters, trained: Collection[int]) -> None:
        self._shapes = [p.shape if place in trained else None for place, p in enumerate(parameters)]
        self._numels = [shape.numel() for shape in self._shapes if shape is not None]
        self.size = sum(self._numels)  # elements

    def views(self, flat: torch.Tensor) -> list[torch.Tensor | None]:
        """[parameter] -> its part of `flat`, [size]; None if it is not trained."""
        pieces = iter(flat.split(self._numels)) if self._numels else iter(())
        return [None if shape is None else next(pieces).view(shape) for shape in self._shapes]

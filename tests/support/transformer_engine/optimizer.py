"""Kernels over lists of tensors, which FusedAdam and Megatron-LM's gradient clipping call."""

from collections.abc import Sequence
from typing import Any

import torch

from tests.support.transformer_engine.cpp_module import MODULE, stands_in

Lists = Sequence[Sequence[torch.Tensor]]


@stands_in
def multi_tensor_scale(chunk_size: int, is_infinite: torch.Tensor, tensor_lists: Lists, scale: Any) -> None:
    """Multiply each tensor of the first list by `scale` into that of the second, and tell of numbers that are none."""
    for source, target in zip(*tensor_lists, strict=True):
        target.copy_(source * scale)
        if not torch.isfinite(target).all():
            is_infinite.fill_(1)


MODULE.multi_tensor_scale_tensor = multi_tensor_scale  # `scale` is a tensor then


@stands_in
def multi_tensor_l2norm(
    chunk_size: int, noop_flag: torch.Tensor, tensor_lists: Lists, per_tensor: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """The norm of all tensors together, [1], and of each."""
    norms = torch.stack([tensor.float().norm() for tensor in tensor_lists[0]] or [torch.zeros(())])
    return norms.norm().view(1), norms if per_tensor else torch.empty(0)


@stands_in
def multi_tensor_adam(
    chunk_size: int,
    noop_flag: torch.Tensor,
    tensor_lists: Lists,
    lr: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: int,
    mode: int,
    bias_correction: int,
    weight_decay: float,
) -> None:
    """One step of Adam.

    tensor_lists: gradients, parameters, first and second moments, and main parameters if parameters are in 16 bits.
    mode: 1 for decoupled weight decay, as in AdamW.
    """
    gradients, parameters, moments, second_moments, *mains = tensor_lists
    correction1 = 1 - beta1**step if bias_correction else 1.0
    correction2 = 1 - beta2**step if bias_correction else 1.0
    stepped = mains[0] if mains else parameters
    for gradient, parameter, m, v, main in zip(gradients, parameters, moments, second_moments, stepped, strict=True):
        gradient, weight = gradient.float(), main.float()
        if mode == 0:
            gradient = gradient + weight_decay * weight
        first = m.float().mul(beta1).add(gradient, alpha=1 - beta1)
        second = v.float().mul(beta2).addcmul(gradient, gradient, value=1 - beta2)
        m.copy_(first)  # which may have 16 bits
        v.copy_(second)
        update = (first / correction1) / ((second / correction2).sqrt() + epsilon)
        if mode == 1:
            update = update + weight_decay * weight
        main.copy_(weight - lr * update)
        if main is not parameter:
            parameter.copy_(main)


@stands_in
def multi_tensor_adam_param_remainder(
    chunk_size: int, noop_flag: torch.Tensor, tensor_lists: Lists, *hyperparameters: Any
) -> None:
    """`multi_tensor_adam` where a main parameter is its upper 16 bits, rounded to the parameter, and the lower ones."""
    gradients, parameters, moments, second_moments, remainders = tensor_lists
    mains = [_joined(*pair) for pair in zip(parameters, remainders, strict=True)]
    multi_tensor_adam(chunk_size, noop_flag, [gradients, mains, moments, second_moments], *hyperparameters)
    for parameter, remainder, main in zip(parameters, remainders, mains, strict=True):
        remainder.copy_(main.view(torch.int32).bitwise_and(0xFFFF).to(torch.int16))
        upper = (main.view(torch.int32) >> 16) + (remainder < 0).int()
        parameter.copy_(upper.to(torch.int16).view(torch.bfloat16))


def _joined(parameter: torch.Tensor, remainder: torch.Tensor) -> torch.Tensor:
    """The main parameter in float32 of a parameter in bfloat16 and 16 bits more."""
    upper = parameter.view(torch.int16).to(torch.int32) - (remainder < 0).int()
    return ((upper << 16) | remainder.to(torch.int32).bitwise_and(0xFFFF)).view(torch.float32)

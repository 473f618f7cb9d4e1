"""The program that a command line is for: `pretrain_gpt.py`, or that of dynamic models if it has a flag of theirs."""

import argparse
import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from examples.dynamic_models.config import DynamicsConfig

__all__ = ["parse", "script"]

_ROOT = Path(__file__).resolve().parents[2]
_FLAGS = {f"--{field.name.replace('_', '-')}" for field in dataclasses.fields(DynamicsConfig)}


def script(argv: list[str]) -> Path:
    """The program's file."""
    return _ROOT / ("pretrain_gpt.py" if _FLAGS.isdisjoint(argv) else "examples/dynamic_models/pretrain.py")


def parse(argv: list[str]) -> tuple[argparse.Namespace, Any, Callable]:
    """Choose the device and parse as the program does. Returns the arguments, the config, and the function that trains
    with these two and with callbacks."""
    from examples.dynamic_models.extension import DynamicModel
    from megatron.balanced.trainer.arguments import parse_arguments

    model = None if _FLAGS.isdisjoint(argv) else DynamicModel()
    args, config = parse_arguments(argv, model)

    from megatron.balanced.trainer.train import train

    return args, config, functools.partial(train, extension=model)

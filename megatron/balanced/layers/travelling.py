"""Writes parts of a layer so that another rank can read them: modules, functions, hooks and other objects.

What every rank has is written as a reference: modules that the spec builds, process groups, configs, and objects that
are global in a module of Python. Functions are written by name, or as code if they refer to constants and parts of the
layer alone. The contents of parameters and buffers are left out; they travel by name (`layer_tensors`).
"""

import enum
import functools
import io
import marshal
import pickle
import sys
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.fp8_utils import is_float8tensor
from megatron.core.model_parallel_config import ModelParallelConfig
from torch.nn.utils import parametrize
from torch.utils.hooks import RemovableHandle

from megatron.balanced.shared.callbacks import StepCallback

__all__ = [
    "CALLABLES",
    "OURS",
    "SET_LATER",
    "Reader",
    "Writer",
    "attributes_of",
    "cells",
    "has_name",
    "is_data",
    "is_of_library",
    "new_parameter",
]

# Attributes that train() sets on the model's config after the model is built. Some layers copy their config.
SET_LATER = (
    "grad_scale_func",
    "no_sync_func",
    "grad_sync_func",
    "param_sync_func",
    "finalize_model_grads_func",
    "timers",
)
OURS = ("megatron.balanced.", "megatron.core.distributed.")  # what they change is made anew on each rank
CALLABLES = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, functools.partial)
_LIBRARIES = ("megatron", "transformer_engine", "torch")
_CONSTANTS = (type(None), bool, int, float, complex, str, bytes, enum.Enum, torch.dtype, torch.Size, type)


class _Ref(NamedTuple):
    """An object of the new rank. kind: how it is found. name: by which it is found."""

    kind: str
    name: Any


class Writer(pickle.Pickler):
    """Writes parts of a layer. What every rank has is written as a reference.

    alone: whether modules and parameters are left out, to see whether one value can travel.
    strict: whether even data counts as copied, since a function may look at what the loop writes there.
    """

    def __init__(self, stream: io.BytesIO, changes: Any, *, alone: bool = False, strict: bool = False) -> None:
        super().__init__(stream, protocol=5)
        self._changes, self._alone, self._strict = changes, alone, strict
        self.copied: list[Any] = []

    def persistent_id(self, obj: Any) -> Any:
        changes = self._changes
        if isinstance(obj, _Ref):
            return tuple(obj)
        if isinstance(obj, torch.nn.Parameter):
            if id(obj) not in changes.index:
                raise pickle.PicklingError("it refers to a parameter outside of the layer")
            return "parameter", changes.index[id(obj)]
        if isinstance(obj, torch.nn.Module):
            if obj not in changes.path_of:
                raise pickle.PicklingError(f"it refers to a {type(obj).__name__} outside of the layer")
            return ("module", "") if self._alone else None
        if obj is changes.config:
            return "config", None
        if obj is changes.groups:
            return "groups", None
        if isinstance(obj, types.ModuleType):
            return "python", obj.__name__
        if isinstance(obj, dist.ProcessGroup):
            return _group_name(obj, changes.groups)
        if isinstance(obj, StepCallback) or (type(obj).__module__.startswith(OURS) and not isinstance(obj, type)):
            raise pickle.PicklingError(f"it refers to a {type(obj).__name__}")
        fixed = (*CALLABLES, *_CONSTANTS, torch.Tensor, tuple, frozenset)
        if not isinstance(obj, fixed) and (self._strict or not is_data(obj)):
            if (name := _global_name(obj)) is not None:
                return "global", name
            if not is_of_library(obj):
                self.copied.append(obj)
        return None

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, torch.nn.Module):
            state = self._changes.states[obj]
            path = self._changes.replaces.get(obj)
            start = (_new_module, (state["kind"],)) if path is None else (_same, (_Ref("module", path),))
            return *start, state, None, None, _set_state
        if isinstance(obj, torch.Tensor):
            return _reduced_tensor(obj)
        if isinstance(obj, torch.device) and obj.type == "cuda":
            return _device, ()
        if isinstance(obj, types.MethodType):  # else it would be found by its name in the object
            return _method, (obj.__func__, obj.__self__)
        if isinstance(obj, types.FunctionType) and not has_name(obj):
            return self._code(obj)
        if isinstance(obj, ModelParallelConfig):
            return _new_config, (type(obj), tuple(self._fields(obj).items()))
        return NotImplemented

    def _code(self, function: types.FunctionType) -> Any:
        values = cells(function)
        for name, value in zip(function.__code__.co_freevars, values, strict=True):
            is_part = isinstance(value, (*CALLABLES, types.ModuleType, torch.nn.Module, torch.nn.Parameter))
            if not (is_part or (isinstance(value, (*_CONSTANTS, tuple)) and is_data(value))):
                raise pickle.PicklingError(f"{function.__qualname__} refers to {name}, a {type(value).__name__}")
        code = marshal.dumps(function.__code__)
        more = function.__defaults__, function.__kwdefaults__, function.__qualname__
        return _new_function, (code, function.__module__, values, *more)

    def _fields(self, config: Any) -> dict[str, Any]:
        shared = self._changes.config
        return {
            name: _Ref("config", name)
            if hasattr(shared, name) and (name in SET_LATER or (value is getattr(shared, name) and not is_data(value)))
            else value
            for name, value in vars(config).items()
        }


class Reader(pickle.Unpickler):
    """Reads parts of a layer that its spec has built as `layer`."""

    def __init__(self, stream: io.BytesIO, layer: torch.nn.Module, config: Any, groups: Any) -> None:
        super().__init__(stream)
        self._modules = dict(layer.named_modules())
        self._config, self._groups = config, groups
        self.parameters: list[torch.nn.Parameter] = []

    def persistent_load(self, reference: Any) -> Any:
        kind, name = reference
        if kind == "parameter":
            return self.parameters[name]
        if kind == "module":
            return self._modules[name]
        if kind == "config":
            return self._config if name is None else getattr(self._config, name)
        if kind == "groups":
            return self._groups if name is None else getattr(self._groups, name)
        if kind == "group":
            return getattr(parallel_state, name)
        if kind == "python":
            return sys.modules[name]
        module, attribute = name
        return getattr(sys.modules[module], attribute)


def _same(module: torch.nn.Module) -> torch.nn.Module:
    return module


def _method(function: Callable, of: Any) -> types.MethodType:
    return types.MethodType(function, of)


def _new_module(kind: type) -> torch.nn.Module:
    module: torch.nn.Module = object.__new__(kind)
    torch.nn.Module.__init__(module)
    return module


def _set_state(module: Any, state: dict[str, Any]) -> None:
    """Give `module` the state that `Changes` has found."""
    if state["kind"] is not None:
        module.__class__ = state["kind"]
    for name in state["gone"]:
        vars(module).pop(name, None)
    vars(module).update(state["values"], training=state["training"])
    module._parameters = state["parameters"]
    module._modules = state["modules"]
    for name in [name for name in module._buffers if name not in state["buffers"]]:
        delattr(module, name)
    for name in [name for name, is_none in state["buffers"].items() if is_none]:
        module._buffers[name] = None
    for kind, hooks in state["hooks"].items():
        if kind == "_is_full_backward_hook":
            module._is_full_backward_hook = hooks
            continue
        for hook, told in hooks:
            of_kind = getattr(module, kind)
            number = RemovableHandle(of_kind).id
            of_kind[number] = hook
            for name in told:
                getattr(module, name)[number] = True
    if state["parametrized"]:
        parametrize._inject_new_class(module)
        for name in state["parametrized"]:
            parametrize._inject_property(module, name)


def new_parameter(known: Any, layer: torch.nn.Module) -> torch.nn.Parameter:
    """The parameter that the spec has built, or a new one, with the attributes that it had."""
    spec, shape, dtype, trains, attributes = known
    if spec is None:
        parameter = torch.nn.Parameter(torch.empty(shape, dtype=dtype, device=torch.cuda.current_device()), trains)
    else:
        parameter = layer.get_submodule(spec[0])._parameters[spec[1]]
        parameter.requires_grad_(trains)
    for name in attributes_of(parameter).keys() - attributes.keys():
        delattr(parameter, name)
    vars(parameter).update(attributes)
    return parameter


def attributes_of(parameter: torch.Tensor) -> dict[str, Any]:
    """What Megatron-LM and others note on a parameter, such as how it is sharded."""
    known = {name: value for name, value in vars(parameter).items() if is_data(value)}
    return {name: known[name] for name in known if not (is_float8tensor(parameter) and name[0] == "_")}


def _new_function(code: bytes, module: str, cells: list[Any], defaults: Any, more: Any, name: str) -> Callable:
    compiled = marshal.loads(code)
    closure = tuple(types.CellType(value) for value in cells)
    function = types.FunctionType(compiled, vars(sys.modules[module]), compiled.co_name, defaults, closure)
    function.__kwdefaults__, function.__qualname__ = more, name
    return function


def _new_config(kind: type, fields: tuple[tuple[str, Any], ...]) -> Any:
    config = object.__new__(kind)
    vars(config).update(fields)
    return config


def _device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def _reduced_tensor(tensor: torch.Tensor) -> Any:
    if tensor.grad_fn is not None:
        return type(None), ()  # of a pass that has ended
    if tensor.layout is not torch.strided or type(tensor) is not torch.Tensor:
        raise pickle.PicklingError(f"a {type(tensor).__name__} with layout {tensor.layout}")
    content = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return _new_tensor, (content, tensor.dtype, tensor.shape, tensor.device.type != "cpu", tensor.requires_grad)


def _new_tensor(content: bytes, dtype: torch.dtype, shape: torch.Size, on_device: bool, trains: bool) -> torch.Tensor:
    flat = torch.from_numpy(np.frombuffer(bytearray(content), dtype=np.uint8)).view(dtype)
    tensor = flat.reshape(shape)
    return (tensor.to(torch.cuda.current_device()) if on_device else tensor).requires_grad_(trains)


def _group_name(process_group: Any, groups: Any) -> tuple[str, str]:
    """A process group by the name that it has on all ranks."""
    for kind, names in (("groups", vars(groups) if groups is not None else {}), ("group", vars(parallel_state))):
        for name, value in names.items():
            if value is process_group:
                return kind, name
    raise pickle.PicklingError("it refers to a process group that megatron.core.parallel_state does not have")


def _global_name(value: Any) -> tuple[str, str] | None:
    """The module of Python and the name under which the module of its class keeps `value`, such as Megatron-LM's
    tracker of random states."""
    home = sys.modules.get(type(value).__module__)
    found = [name for name, other in list(vars(home).items()) if other is value] if home is not None else []
    return (type(value).__module__, found[0]) if found else None


def has_name(function: Any) -> bool:
    """Whether other ranks find `function` by its name."""
    found: Any = sys.modules.get(function.__module__)
    for name in function.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is function


def cells(function: types.FunctionType) -> list[Any]:
    """What `function` refers to of the function around it."""
    return [cell.cell_contents for cell in function.__closure__ or () if cell != types.CellType()]  # no empty ones


def is_of_library(value: Any) -> bool:
    return type(value).__module__.partition(".")[0] in _LIBRARIES and not isinstance(value, torch.Tensor)


def is_data(value: Any) -> bool:
    """Whether `value` consists of constants alone."""
    if isinstance(value, dict):
        return all(map(is_data, (*value.keys(), *value.values())))
    if isinstance(value, list | tuple | set | frozenset):
        return all(map(is_data, value))
    if hasattr(value, "__dataclass_fields__") and not isinstance(value, type):
        return all(map(is_data, vars(value).values())) if hasattr(value, "__dict__") else False
    return isinstance(value, _CONSTANTS)

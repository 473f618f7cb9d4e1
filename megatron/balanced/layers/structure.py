"""How a layer differs from what its spec builds, so that it arrives on another stage as it was.

Loops change layers after they are built: adapters wrap modules, parametrizations and scales add parameters, pruning
makes weights smaller, parts are frozen, hooks are registered, methods of one module are replaced. A moved layer is
built from its spec on the new stage, since device memory, process groups and the state of 8-bit weights belong to a
rank. Then it is given the structure that it had: its modules, parameters, buffers and hooks, what trains, and the
attributes that somebody changed. Contents of parameters and buffers travel by name (`layer_tensors`).

What a layer refers to must exist on the other rank, or be copied. Process groups, configs, global objects and functions
of modules are found there by name. A function made inside another one travels as code if it refers to constants and
parts of its layer alone. Other objects are copied if they pickle and belong to one layer. The rest is refused.
"""

import copy
import enum
import functools
import io
import marshal
import pickle
import sys
import types
from collections.abc import Callable, Iterator, Sequence
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

__all__ = ["BY_HAND", "SET_LATER", "Structure"]

# Attributes that train() sets on the model's config after the model is built. Some layers copy their config.
SET_LATER = (
    "grad_scale_func",
    "no_sync_func",
    "grad_sync_func",
    "param_sync_func",
    "finalize_model_grads_func",
    "timers",
)
_OF_TORCH = frozenset(vars(torch.nn.Module()))  # attributes of every module
# Kinds of hooks of a module, each with the attributes that say more of a hook.
_HOOKS = {
    "_forward_pre_hooks": ("_forward_pre_hooks_with_kwargs",),
    "_forward_hooks": ("_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
    "_backward_pre_hooks": (),
    "_backward_hooks": (),
    "_state_dict_pre_hooks": (),
    "_state_dict_hooks": (),
    "_load_state_dict_pre_hooks": (),
    "_load_state_dict_post_hooks": (),
}
_OURS = ("megatron.balanced.", "megatron.core.distributed.")  # what they change is made anew on each rank
_LIBRARIES = ("megatron", "transformer_engine", "torch")
_CONSTANTS = (type(None), bool, int, float, complex, str, bytes, enum.Enum, torch.dtype, torch.Size, type)
_CALLABLES = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, functools.partial)
BY_HAND = "or let a StepCallback that you pass to Balancers set it in `layer_arrived`"


class _Built(NamedTuple):
    """A module as its spec builds it.

    kind: its class.
    values: attribute -> what `_shape_of` says of it.
    parameters: name -> shape, type and path of the module.
    hooks: names of the functions of its hooks.
    children: names of its submodules.
    """

    kind: type
    values: dict[str, Any]
    parameters: dict[str, tuple[torch.Size, torch.dtype]]
    hooks: frozenset[str]
    children: tuple[str, ...]


class Structure:
    """What the spec builds for one layer, to tell how the layer of a loop differs from it.

    built: the layer as its spec builds it, in its place of the present layout. It is not kept.
    """

    def __init__(self, built: torch.nn.Module) -> None:
        self._built = {path: _built(module) for path, module in built.named_modules()}
        self._settings: dict[str, frozenset[str]] = {}  # path -> changed attributes of a module with 8-bit scaling

    def changes_of(self, layer: torch.nn.Module, config: Any, groups: Any, *, first: bool = False) -> "Changes":
        """How `layer` differs. config, groups: the model's config and process groups.

        first: whether the model has not trained yet, so that unknown attributes are the loop's.

        Raises ValueError for what cannot travel, with the name of the module.
        """
        return Changes(self, layer, config, groups, first)

    def apply(self, layer: torch.nn.Module, changes: bytes, config: Any, groups: Any) -> None:
        """Change `layer`, which its spec has just built, by the `changes` of another rank. New parameters have no
        content. Buffers are registered later, with their content."""
        reader = _Reader(io.BytesIO(changes), layer, config, groups)
        reader.parameters = [_parameter(known, layer) for known in reader.load()]
        changed, hooks = reader.load()
        assert changed is layer
        for parameter, (of_gradient, after_accumulation) in zip(reader.parameters, hooks, strict=True):
            trains = parameter.requires_grad
            parameter.requires_grad_(True)  # it may have been frozen after it got a hook
            for hook in of_gradient:
                parameter.register_hook(hook)
            for hook in after_accumulation:
                parameter.register_post_accumulate_grad_hook(hook)
            parameter.requires_grad_(trains)


class Changes:
    """How a layer differs from what its spec builds.

    data: the changes, for `Structure.apply`.
    copied: the objects that would arrive as copies, by `id`, each with a sentence that names what refers to it.
    """

    def __init__(self, structure: Structure, layer: torch.nn.Module, config: Any, groups: Any, first: bool) -> None:
        self._structure, self._layer, self._config, self._groups = structure, layer, config, groups
        self._first = first
        self._path_of = {module: path for path, module in layer.named_modules()}
        self._replaces: dict[torch.nn.Module, str] = {}  # module -> path of that which the spec builds in its place
        if not isinstance(layer, structure._built[""].kind):
            raise ValueError(
                f"{self.name(layer)} is a {type(layer).__name__}, and its spec builds a "
                f"{structure._built[''].kind.__name__}; give LayerBalancer the spec of the model"
            )
        self._match(layer, "")
        self.copied: dict[int, tuple[Any, str]] = {}
        self.index = {id(parameter): number for number, parameter in enumerate(layer.parameters())}
        self._states = {module: self._state_of(module) for module in self._path_of}
        self.data = self._pickled()

    def name(self, module: torch.nn.Module) -> str:
        """The full name of a module of the layer, with the number of the layer in the whole model."""
        number = getattr(self._layer, "layer_number", 0) - 1
        return ".".join(filter(None, (f"decoder.layers.{number}", self._path_of[module])))

    def _match(self, module: torch.nn.Module, path: str) -> None:
        """Pair `module` with the module that the spec builds at `path`, and find the pairs of its submodules. A module
        that the spec builds may be inside of another one, such as an adapter."""
        self._replaces[module] = path
        for child in self._structure._built[path].children:
            inner, at = (f"{path}.{child}" if path else child), module._modules.get(child)
            known = self._structure._built.get(inner)
            if known is None or at is None:
                continue
            found = [part for part in at.modules() if isinstance(part, known.kind) and part not in self._replaces]
            same = [part for part in found if known.parameters.items() <= _sizes(part).items()]
            for part in [*same, *found][:1]:
                self._match(part, inner)

    def known(self, module: torch.nn.Module) -> _Built | None:
        """What the spec builds in place of `module`; None for what somebody added."""
        return self._structure._built[self._replaces[module]] if module in self._replaces else None

    # What differs.

    def _state_of(self, module: torch.nn.Module) -> dict[str, Any]:
        """The changes of one module without its submodules, or all of it if the spec does not build it."""
        known = self.known(module)
        kind, names = type(module), []
        if parametrize.is_parametrized(module):
            kind, names = kind.__bases__[0], list(module.parametrizations)
        if known is not None and kind.__module__.startswith(_OURS):
            kind = known.kind
        return {
            "kind": None if known is not None and kind is known.kind else kind,
            "parametrized": names,
            "values": self._values(module, known),
            "gone": [name for name in (known.values if known else ()) if name not in vars(module)],
            "parameters": dict(module._parameters),
            "buffers": {name: buffer is None for name, buffer in module._buffers.items()},
            "hooks": self._hooks(module, known),
            "modules": dict(module._modules),
            "training": module.training,
        }

    def _values(self, module: torch.nn.Module, known: _Built | None) -> dict[str, Any]:
        values = {name: _theirs(value) for name, value in vars(module).items() if name not in _OF_TORCH}
        values = {name: value for name, value in values.items() if not _is_ours(value)}
        if known is None:
            return values
        balanced = type(module).__module__.startswith(_OURS) and type(module) is not known.kind
        changed = {}
        for name, value in values.items():
            shape = _shape_of(value)
            if shape == known.values.get(name, _Absent) or shape == ("method", name):
                continue
            if balanced and not isinstance(value, _CALLABLES):
                continue
            if shape[0] == "object" and (_of_library(value) or not self._travels(value)):
                continue
            changed[name] = value
        if hasattr(module, "fp8_meta"):  # while it trains, Transformer Engine changes others than the loop does
            settled = self._structure._settings.setdefault(self._replaces[module], frozenset(changed))
            changed = {name: value for name, value in changed.items() if name in settled}
        return changed

    def _travels(self, value: Any) -> bool:
        """Whether an object that somebody has put on a module of Megatron-LM can be copied. It is refused if the loop
        did that before it trained; later it may be anything that a pass left behind."""
        try:
            _Writer(io.BytesIO(), self, alone=True).dump(value)
        except Exception:
            return self._first
        return True

    def _hooks(self, module: torch.nn.Module, known: _Built | None) -> dict[str, list[tuple[Any, dict[str, bool]]]]:
        hooks: dict[str, list[tuple[Any, dict[str, bool]]]] = {}
        for kind, more in _HOOKS.items():
            for number, hook in getattr(module, kind).items():
                if not (_is_ours(hook, is_hook=True) or (known is not None and _name_of(hook) in known.hooks)):
                    told = {name: True for name in more if number in getattr(module, name)}
                    hooks.setdefault(kind, []).append((hook, told))
        if module._is_full_backward_hook is not None:
            hooks["_is_full_backward_hook"] = module._is_full_backward_hook
        return hooks

    # The message.

    def _pickled(self) -> bytes:
        parameters = list(self._layer.parameters())
        names = dict(zip(map(id, parameters), self._layer.named_parameters(), strict=True))
        owners = {id(p): m for m in reversed(self._path_of) for p in m._parameters.values() if p is not None}
        hooks, table = [], []
        for parameter in parameters:
            module, attribute = owners[id(parameter)], names[id(parameter)][0].rpartition(".")[2]
            known = self.known(module)
            spec = None
            if known is not None and known.parameters.get(attribute) == (parameter.shape, parameter.dtype):
                spec = self._replaces[module], attribute
            elif type(parameter) is not torch.nn.Parameter:
                raise self.refusal(
                    module, f"its parameter {attribute} is a {type(parameter).__name__}", "use Parameter"
                )
            table.append((spec, parameter.shape, parameter.dtype, parameter.requires_grad, _attributes(parameter)))
            theirs = [
                [hook for hook in (getattr(parameter, kind, None) or {}).values() if not _is_ours(hook, is_hook=True)]
                for kind in ("_backward_hooks", "_post_accumulate_grad_hooks")
            ]
            hooks.append(theirs)
            for hook in [hook for of_kind in theirs for hook in of_kind]:
                self._check(module, f"hook {_name_of(hook)} of its parameter {attribute}", hook)
        for module, state in self._states.items():
            for name, value in state["values"].items():
                self._check(module, f"attribute {name}", value)
            for of_kind in [kind for kind in state["hooks"].values() if isinstance(kind, list)]:
                for hook, _ in of_kind:
                    self._check(module, f"hook {_name_of(hook)}", hook)
            if state["kind"] is not None:
                self._check(module, f"class {state['kind'].__qualname__}", state["kind"])
        stream = io.BytesIO()
        writer = _Writer(stream, self)
        writer.dump(table)
        writer.dump((self._layer, hooks))
        return stream.getvalue()

    def _check(self, module: torch.nn.Module, what: str, value: Any) -> None:
        """Raise ValueError if `value` cannot travel. Note the objects that would be copied."""
        writer = _Writer(io.BytesIO(), self, alone=True, strict=callable(value))
        try:
            writer.dump(value)
        except Exception as error:
            reason = str(error).splitlines()[0]
            raise self.refusal(module, f"its {what} cannot be sent ({reason})", "make it of a module") from error
        for each in writer.copied:
            self.copied.setdefault(id(each), (each, f"the {what} of {self.name(module)}"))

    def refusal(self, module: torch.nn.Module, what: str, instead: str) -> ValueError:
        return ValueError(f"{self.name(module)} cannot move to another stage: {what}; {instead}, {BY_HAND}")


class _Absent:
    """Stands for an attribute that a module does not have."""


class _Ref(NamedTuple):
    """An object of the new rank. kind: how it is found. name: by which it is found."""

    kind: str
    name: Any


class _Writer(pickle.Pickler):
    """Writes parts of a layer. What every rank has is written as a reference.

    alone: whether modules and parameters are left out, to see whether one value can travel.
    strict: whether even data counts as copied, since a function may look at what the loop writes there.
    """

    def __init__(self, stream: io.BytesIO, changes: Changes, *, alone: bool = False, strict: bool = False) -> None:
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
            if obj not in changes._path_of:
                raise pickle.PicklingError(f"it refers to a {type(obj).__name__} outside of the layer")
            return ("module", "") if self._alone else None
        if obj is changes._config:
            return "config", None
        if obj is changes._groups:
            return "groups", None
        if isinstance(obj, types.ModuleType):
            return "python", obj.__name__
        if isinstance(obj, dist.ProcessGroup):
            return _group_name(obj, changes._groups)
        if isinstance(obj, StepCallback) or (type(obj).__module__.startswith(_OURS) and not isinstance(obj, type)):
            raise pickle.PicklingError(f"it refers to a {type(obj).__name__}")
        fixed = (*_CALLABLES, *_CONSTANTS, torch.Tensor, tuple, frozenset)
        if not isinstance(obj, fixed) and (self._strict or not _is_data(obj)):
            if (name := _global_name(obj)) is not None:
                return "global", name
            if not _of_library(obj):
                self.copied.append(obj)
        return None

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, torch.nn.Module):
            state = self._changes._states[obj]
            path = self._changes._replaces.get(obj)
            start = (_new_module, (state["kind"],)) if path is None else (_same, (_Ref("module", path),))
            return *start, state, None, None, _set_state
        if isinstance(obj, torch.Tensor):
            return _reduced_tensor(obj)
        if isinstance(obj, torch.device) and obj.type == "cuda":
            return _device, ()
        if isinstance(obj, types.MethodType):  # else it would be found by its name in the object
            return _method, (obj.__func__, obj.__self__)
        if isinstance(obj, types.FunctionType) and not _has_name(obj):
            return self._code(obj)
        if isinstance(obj, ModelParallelConfig):
            return _new_config, (type(obj), self._fields(obj))
        return NotImplemented

    def _code(self, function: types.FunctionType) -> Any:
        cells = _cells(function)
        for name, value in zip(function.__code__.co_freevars, cells, strict=True):
            is_part = isinstance(value, (*_CALLABLES, types.ModuleType, torch.nn.Module, torch.nn.Parameter))
            if not (is_part or (isinstance(value, (*_CONSTANTS, tuple)) and _is_data(value))):
                raise pickle.PicklingError(f"{function.__qualname__} refers to {name}, a {type(value).__name__}")
        code = marshal.dumps(function.__code__)
        more = function.__defaults__, function.__kwdefaults__, function.__qualname__
        return _new_function, (code, function.__module__, cells, *more)

    def _fields(self, config: Any) -> dict[str, Any]:
        shared = self._changes._config
        return {
            name: _Ref("config", name)
            if hasattr(shared, name) and (name in SET_LATER or (value is getattr(shared, name) and not _is_data(value)))
            else value
            for name, value in vars(config).items()
        }


class _Reader(pickle.Unpickler):
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


# How modules, parameters and other parts are made anew.


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


def _parameter(known: Any, layer: torch.nn.Module) -> torch.nn.Parameter:
    """The parameter that the spec has built, or a new one, with the attributes that it had."""
    spec, shape, dtype, trains, attributes = known
    if spec is None:
        parameter = torch.nn.Parameter(torch.empty(shape, dtype=dtype, device=torch.cuda.current_device()), trains)
    else:
        parameter = layer.get_submodule(spec[0])._parameters[spec[1]]
        parameter.requires_grad_(trains)
    for name in _attributes(parameter).keys() - attributes.keys():
        delattr(parameter, name)
    vars(parameter).update(attributes)
    return parameter


def _new_function(code: bytes, module: str, cells: list[Any], defaults: Any, more: Any, name: str) -> Callable:
    compiled = marshal.loads(code)
    closure = tuple(types.CellType(value) for value in cells)
    function = types.FunctionType(compiled, vars(sys.modules[module]), compiled.co_name, defaults, closure)
    function.__kwdefaults__, function.__qualname__ = more, name
    return function


def _new_config(kind: type, fields: dict[str, Any]) -> Any:
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


# What is known of values.


def _built(module: torch.nn.Module) -> _Built:
    values = {name: _shape_of(value) for name, value in vars(module).items() if name not in _OF_TORCH}
    hooks = frozenset(_name_of(hook) for kind in _HOOKS for hook in getattr(module, kind).values())
    return _Built(type(module), values, _sizes(module), hooks, tuple(module._modules))


def _sizes(module: torch.nn.Module) -> dict[str, tuple[torch.Size, torch.dtype]]:
    return {name: (p.shape, p.dtype) for name, p in module._parameters.items() if p is not None}


def _shape_of(value: Any) -> tuple[str, Any]:
    """What tells whether an attribute was changed: data itself, the name of a function, or the class of an object."""
    if isinstance(value, _CALLABLES):
        own = value.__self__ if isinstance(value, types.MethodType) else None
        if isinstance(own, torch.nn.Module) and getattr(type(own), value.__name__, None) is value.__func__:
            return "method", value.__name__
        return "function", _name_of(value)
    return ("data", copy.deepcopy(value)) if _is_data(value) else ("object", type(value))


def _is_data(value: Any) -> bool:
    """Whether `value` consists of constants alone."""
    if isinstance(value, dict):
        return all(map(_is_data, (*value.keys(), *value.values())))
    if isinstance(value, list | tuple | set | frozenset):
        return all(map(_is_data, value))
    if hasattr(value, "__dataclass_fields__") and not isinstance(value, type):
        return all(map(_is_data, vars(value).values())) if hasattr(value, "__dict__") else False
    return isinstance(value, _CONSTANTS)


def _parts_of(value: Any, depth: int = 4) -> Iterator[Any]:
    """What a function or a container refers to."""
    yield value
    inner: Sequence[Any] = ()
    if isinstance(value, functools.partial):
        inner = value.func, *value.args, *value.keywords.values()
    elif isinstance(value, types.MethodType):
        inner = value.__self__, value.__func__
    elif isinstance(value, types.FunctionType):
        inner = _cells(value)
    elif isinstance(value, list | tuple):
        inner = value
    elif isinstance(value, dict):
        inner = list(value.values())
    for part in inner if depth else ():
        yield from _parts_of(part, depth - 1)


def _cells(function: types.FunctionType) -> list[Any]:
    """What `function` refers to of the function around it."""
    return [cell.cell_contents for cell in function.__closure__ or () if cell != types.CellType()]  # no empty ones


def _is_ours(value: Any, *, is_hook: bool = False) -> bool:
    """Whether balancers, data parallelism or a callback have made `value`. They do it again when a layer arrives."""
    return any(
        isinstance(part, StepCallback)
        or (
            isinstance(part, types.FunctionType)
            and part.__module__.startswith(_OURS)
            and is_hook | (not _has_name(part))
        )
        or (type(part).__module__.startswith(_OURS) and not isinstance(part, torch.nn.Module | enum.Enum))
        for part in _parts_of(value)
    )


def _theirs(value: Any) -> Any:
    """The method that the loop has put into the place of a module's own, if a balancer calls it from its own."""
    while isinstance(value, functools.partial) and _is_ours(value):
        inner = [part for part in value.args if isinstance(part, _CALLABLES)]
        if not inner:
            break
        value = inner[0]
    return value


def _of_library(value: Any) -> bool:
    return type(value).__module__.partition(".")[0] in _LIBRARIES and not isinstance(value, torch.Tensor)


def _attributes(parameter: torch.Tensor) -> dict[str, Any]:
    """What Megatron-LM and others note on a parameter, such as how it is sharded."""
    known = {name: value for name, value in vars(parameter).items() if _is_data(value)}
    return {name: known[name] for name in known if not (is_float8tensor(parameter) and name[0] == "_")}


def _global_name(value: Any) -> tuple[str, str] | None:
    """The module of Python and the name under which the module of its class keeps `value`, such as Megatron-LM's
    tracker of random states."""
    home = sys.modules.get(type(value).__module__)
    found = [name for name, other in list(vars(home).items()) if other is value] if home is not None else []
    return (type(value).__module__, found[0]) if found else None


def _has_name(function: Any) -> bool:
    """Whether other ranks find `function` by its name."""
    found: Any = sys.modules.get(function.__module__)
    for name in function.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is function


def _name_of(hook: Any) -> str:
    if isinstance(hook, functools.partial):
        return f"{_name_of(hook.func)}{[value for value in (*hook.args, *hook.keywords.items()) if _is_data(value)]}"
    function = getattr(hook, "__func__", hook)
    return f"{function.__module__}.{getattr(function, '__qualname__', type(function).__qualname__)}"

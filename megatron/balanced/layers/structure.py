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
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn.utils import parametrize

from megatron.balanced.layers.travelling import (
    CALLABLES,
    OURS,
    Reader,
    Writer,
    attributes_of,
    cells,
    has_name,
    is_data,
    is_of_library,
    new_parameter,
)
from megatron.balanced.shared.callbacks import StepCallback

__all__ = ["BY_HAND", "HOOK_ATTRIBUTES", "Structure", "check_end"]

_OF_TORCH = frozenset(vars(torch.nn.Module()))  # attributes of every module
HOOK_ATTRIBUTES = frozenset(name for name in _OF_TORCH if "hook" in name)
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
BY_HAND = "or let a StepCallback that you pass to Balancers set it in `layer_arrived`"


# Attributes of adapters of Megatron-Bridge in which they keep modules from their first use on -> whether they do.
_MADE_LATER: dict[str, Callable[[Any], bool]] = {
    "_fused_branches": lambda config: True, "_te_grouped_linear_helpers": lambda config: bool(config.fp8 or config.fp4)
}  # fmt: skip


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
        reader = Reader(io.BytesIO(changes), layer, config, groups)
        reader.parameters = [new_parameter(known, layer) for known in reader.load()]
        changed, hooks, self._settings = reader.load()
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
        self._structure, self._layer, self.config, self.groups = structure, layer, config, groups
        self._first = first
        self.path_of = {module: path for path, module in layer.named_modules()}
        self.replaces: dict[torch.nn.Module, str] = {}  # module -> path of that which the spec builds in its place
        if not isinstance(layer, structure._built[""].kind):
            raise ValueError(
                f"{self.name(layer)} is a {type(layer).__name__}, and its spec builds a "
                f"{structure._built[''].kind.__name__}; give LayerBalancer the spec of the model"
            )
        self._match(layer, "")
        for module in self.path_of if first else ():
            for name, makes in _MADE_LATER.items():
                if hasattr(module, name) and makes(config):
                    raise self.refusal(module, f"it makes modules at its first use ({name})", "use another adapter")
        self.copied: dict[int, tuple[Any, str]] = {}
        self.index = {id(parameter): number for number, parameter in enumerate(layer.parameters())}
        self.states = {module: self._state_of(module) for module in self.path_of}
        self.data = self._pickled()

    def name(self, module: torch.nn.Module) -> str:
        """The full name of a module of the layer, with the number of the layer in the whole model."""
        number = getattr(self._layer, "layer_number", 0) - 1
        return ".".join(filter(None, (f"decoder.layers.{number}", self.path_of[module])))

    def _match(self, module: torch.nn.Module, path: str) -> None:
        """Pair `module` with the module that the spec builds at `path`, and find the pairs of its submodules. A module
        that the spec builds may be inside of another one, such as an adapter."""
        self.replaces[module] = path
        for child in self._structure._built[path].children:
            inner, at = (f"{path}.{child}" if path else child), module._modules.get(child)
            known = self._structure._built.get(inner)
            if known is None or at is None:
                continue
            found = [part for part in at.modules() if isinstance(part, known.kind) and part not in self.replaces]
            same = [part for part in found if known.parameters.items() <= _sizes(part).items()]
            for part in [*same, *found][:1]:
                self._match(part, inner)

    def known(self, module: torch.nn.Module) -> _Built | None:
        """What the spec builds in place of `module`; None for what somebody added."""
        return self._structure._built[self.replaces[module]] if module in self.replaces else None

    # What differs.

    def _state_of(self, module: torch.nn.Module) -> dict[str, Any]:
        """The changes of one module without its submodules, or all of it if the spec does not build it."""
        known = self.known(module)
        kind, names = type(module), []
        if parametrize.is_parametrized(module):
            kind, names = kind.__bases__[0], list(module.parametrizations)
        if known is not None and kind.__module__.startswith(OURS):
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
        balanced = type(module).__module__.startswith(OURS) and type(module) is not known.kind
        changed = {}
        for name, value in values.items():
            shape = _shape_of(value)
            if shape == known.values.get(name, _Absent) or shape == ("method", name):
                continue
            if name.endswith("init_method"):  # its work is done
                continue
            if balanced and not isinstance(value, CALLABLES):
                continue
            if shape[0] == "object" and (is_of_library(value) or not self._travels(value)):
                continue
            changed[name] = value
        if hasattr(module, "fp8_meta"):  # while it trains, Transformer Engine changes others than the loop does
            settled = self._structure._settings.setdefault(self.replaces[module], frozenset(changed))
            changed = {name: value for name, value in changed.items() if name in settled}
        return changed

    def _travels(self, value: Any) -> bool:
        """Whether an object that somebody has put on a module of Megatron-LM can be copied. It is refused if the loop
        did that before it trained; later it may be anything that a pass left behind."""
        try:
            Writer(io.BytesIO(), self, alone=True).dump(value)
        except Exception:  # whatever an object's own way of pickling raises
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
        owners = {id(p): m for m in reversed(self.path_of) for p in m._parameters.values() if p is not None}
        hooks, table = [], []
        for parameter in parameters:
            module, attribute = owners[id(parameter)], names[id(parameter)][0].rpartition(".")[2]
            known = self.known(module)
            spec = None
            if known is not None and known.parameters.get(attribute) == (parameter.shape, parameter.dtype):
                spec = self.replaces[module], attribute
            elif type(parameter) is not torch.nn.Parameter:
                raise self.refusal(
                    module, f"its parameter {attribute} is a {type(parameter).__name__}", "use Parameter"
                )
            table.append((spec, parameter.shape, parameter.dtype, parameter.requires_grad, attributes_of(parameter)))
            theirs = [
                [hook for hook in (getattr(parameter, kind, None) or {}).values() if not _is_ours(hook, is_hook=True)]
                for kind in ("_backward_hooks", "_post_accumulate_grad_hooks")
            ]
            hooks.append(theirs)
            for hook in [hook for of_kind in theirs for hook in of_kind]:
                self._check(module, f"hook {_name_of(hook)} of its parameter {attribute}", hook)
        for module, state in self.states.items():
            for name, value in state["values"].items():
                self._check(module, f"attribute {name}", value)
            for of_kind in [kind for kind in state["hooks"].values() if isinstance(kind, list)]:
                for hook, _ in of_kind:
                    self._check(module, f"hook {_name_of(hook)}", hook)
            if state["kind"] is not None:
                self._check(module, f"class {state['kind'].__qualname__}", state["kind"])
        stream = io.BytesIO()
        writer = Writer(stream, self)
        writer.dump(table)
        writer.dump((self._layer, hooks, self._structure._settings))
        return stream.getvalue()

    def _check(self, module: torch.nn.Module, what: str, value: Any) -> None:
        """Raise ValueError if `value` cannot travel. Note the objects that would be copied."""
        writer = Writer(io.BytesIO(), self, alone=True, strict=callable(value))
        try:
            writer.dump(value)
        except Exception as error:
            reason = str(error).splitlines()[0]
            raise self.refusal(module, f"its {what} cannot be sent ({reason})", "make it of a module") from error
        for each in writer.copied:
            self.copied.setdefault(id(each), (each, f"the {what} of {self.name(module)}"))

    def refusal(self, module: torch.nn.Module, what: str, instead: str) -> ValueError:
        return ValueError(f"{self.name(module)} cannot move to another stage: {what}; {instead}, {BY_HAND}")


def check_end(module: torch.nn.Module, name: str) -> None:
    """Raise ValueError if a loop has changed the final norm or the head, which another stage would build anew.

    name: name of the module in the model, for the message.
    """
    weights = dict(module.named_parameters())
    hooks = [hook for kind in ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
             for part in module.modules() for hook in getattr(part, kind).values()]  # fmt: skip
    hooks += [hook for weight in weights.values() for kind in ("_backward_hooks", "_post_accumulate_grad_hooks")
              for hook in (getattr(weight, kind) or {}).values()]  # fmt: skip
    what = [f"hook {_name_of(hook)}" for hook in hooks if not _is_ours(hook, is_hook=True)]
    what += [f"parameter {each}" for each in weights if each not in ("weight", "bias")]
    what += ["method forward"] * ("forward" in vars(module) and not _is_ours(module.forward))
    if what:
        raise ValueError(
            f"{name} may move to another stage, which builds it by its spec, without its {what[0]}; leave {name} as "
            "its spec builds it, or balance no layers"
        )


class _Absent:
    """Stands for an attribute that a module does not have."""


def _built(module: torch.nn.Module) -> _Built:
    values = {name: _shape_of(value) for name, value in vars(module).items() if name not in _OF_TORCH}
    hooks = frozenset(_name_of(hook) for kind in _HOOKS for hook in getattr(module, kind).values())
    return _Built(type(module), values, _sizes(module), hooks, tuple(module._modules))


def _sizes(module: torch.nn.Module) -> dict[str, tuple[torch.Size, torch.dtype]]:
    return {name: (p.shape, p.dtype) for name, p in module._parameters.items() if p is not None}


def _shape_of(value: Any) -> tuple[str, Any]:
    """What tells whether an attribute was changed: data itself, the name of a function, or the class of an object."""
    if isinstance(value, CALLABLES):
        own = value.__self__ if isinstance(value, types.MethodType) else None
        if isinstance(own, torch.nn.Module) and getattr(type(own), value.__name__, None) is value.__func__:
            return "method", value.__name__
        return "function", _name_of(value)
    return ("data", copy.deepcopy(value)) if is_data(value) else ("object", type(value))


def _parts_of(value: Any, depth: int = 4) -> Iterator[Any]:
    """What a function or a container refers to."""
    yield value
    inner: Sequence[Any] = ()
    if isinstance(value, functools.partial):
        inner = value.func, *value.args, *value.keywords.values()
    elif isinstance(value, types.MethodType):
        inner = value.__self__, value.__func__
    elif isinstance(value, types.FunctionType):
        inner = cells(value)
    elif isinstance(value, list | tuple):
        inner = value
    elif isinstance(value, dict):
        inner = list(value.values())
    for part in inner if depth else ():
        yield from _parts_of(part, depth - 1)


def _is_ours(value: Any, *, is_hook: bool = False) -> bool:
    """Whether balancers, data parallelism or a callback have made `value`. They do it again when a layer arrives."""
    return any(
        isinstance(part, StepCallback)
        or (
            isinstance(part, types.FunctionType) and part.__module__.startswith(OURS) and is_hook | (not has_name(part))
        )
        or (type(part).__module__.startswith(OURS) and not isinstance(part, torch.nn.Module | enum.Enum))
        for part in _parts_of(value)
    )


def _theirs(value: Any) -> Any:
    """The method that the loop has put into the place of a module's own, if a balancer calls it from its own."""
    while isinstance(value, functools.partial) and _is_ours(value):
        inner = [part for part in value.args if isinstance(part, CALLABLES)]
        if not inner:
            break
        value = inner[0]
    return value


def _name_of(hook: Any) -> str:
    if isinstance(hook, functools.partial):
        return f"{_name_of(hook.func)}{[value for value in (*hook.args, *hook.keywords.items()) if is_data(value)]}"
    function = getattr(hook, "__func__", hook)
    return f"{function.__module__}.{getattr(function, '__qualname__', type(function).__qualname__)}"

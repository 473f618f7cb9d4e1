"""Replacing functions by name, checked like a patch: a benchmark measures nothing if what it replaces has changed.

A replacement takes every call that the original takes, by position and by name. Otherwise it would fail where it is
called, long after the change that made it wrong, or be given other arguments than it thinks.
"""

import inspect
from collections.abc import Callable, Mapping
from inspect import Parameter, Signature
from typing import Any

__all__ = ["mismatch", "replace_name", "signature_of"]

_BY_POSITION = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)


def replace_name(owner: Any, name: str, replacement: Any, put: Callable[[Any, str, Any], object] = setattr) -> None:
    """Make `replacement` the attribute `name` of a module, a class or an object.

    put: what sets the attribute.

    Raises AttributeError if there is no such attribute. Raises ValueError if it is a function or a class that takes a
    call which `replacement` does not take; the attribute is then as before.
    """
    original, static = getattr(owner, name), inspect.getattr_static(owner, name)
    put(owner, name, replacement)
    if why := mismatch(signature_of(getattr(owner, name), wrapped=False), signature_of(original)):
        setattr(owner, name, static)
        raise ValueError(f"{getattr(owner, '__name__', type(owner).__name__)}.{name} cannot be replaced: {why}")


def signature_of(function: Any, wrapped: bool = True) -> Signature | None:
    """The signature of a function or a class; None of anything else, and where Python does not know it.

    wrapped: of a decorated function that of the function inside, which its callers write for.
    """
    try:
        return inspect.signature(function, follow_wrapped=wrapped) if callable(function) else None
    except (TypeError, ValueError):
        return None  # built in


def mismatch(replacement: Signature | None, original: Signature | None) -> str:
    """Why `replacement` does not take all calls of `original`; empty if it does, or if one of them is not known."""
    if replacement is None or original is None:
        return ""
    ours, theirs = replacement.parameters, original.parameters
    kinds = {each.kind for each in ours.values()}
    places, others = _by_position(ours), _by_position(theirs)
    for place, each in enumerate(others):
        own = places[place] if place < len(places) else None
        if own is None and Parameter.VAR_POSITIONAL not in kinds:
            return f"{replacement} takes no argument {place + 1}, '{each.name}' of {original}"
        if own is not None and each.name != own.name and _has_name(each):
            return f"{replacement} takes '{own.name}' where {original} has '{each.name}'"
        if own is not None and own.default is Parameter.empty and each.default is not Parameter.empty:
            return f"{replacement} needs '{own.name}', which {original} does not"
    for name, each in theirs.items():
        if each.kind in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD):
            if each.kind not in kinds:
                return f"{replacement} takes fewer arguments than {original}"
        elif _has_name(each) and Parameter.VAR_KEYWORD not in kinds and not (name in ours and _has_name(ours[name])):
            return f"{replacement} does not take '{name}' of {original} by its name"
    if any(each.kind is Parameter.VAR_POSITIONAL for each in theirs.values()):
        return ""  # what it needs may be among these
    taken = {each.name for each in places[: len(others)]}
    for name, each in ours.items():
        needed = each.default is Parameter.empty and each.kind not in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
        if needed and name not in taken and (name not in theirs or theirs[name].default is not Parameter.empty):
            return f"{replacement} needs '{name}', which {original} does not"
    return ""


def _by_position(parameters: Mapping[str, Parameter]) -> list[Parameter]:
    return [each for each in parameters.values() if each.kind in _BY_POSITION]


def _has_name(parameter: Parameter) -> bool:
    """Whether callers may give it by its name; nobody gives the object of a method so."""
    return parameter.kind in (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY) and parameter.name not in (
        "self", "cls",
    )  # fmt: skip

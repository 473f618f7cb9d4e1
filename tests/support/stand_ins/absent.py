"""Packages that are not there, as empty modules: for a framework that imports more than the parts under test use."""

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Sequence
from typing import Any

from tests.support.packages_apart import unhide

__all__ = ["stand_in_for"]


class _Empty(types.ModuleType):
    """Each attribute that is asked for is an empty class, which takes any arguments."""

    __version__ = "99.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = type(name, (), {"__init__": lambda self, *args, **kwargs: None})
        setattr(self, name, value)
        return value


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, names: Sequence[str]) -> None:
        self._names = names

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if any(fullname == name or fullname.startswith(f"{name}.") for name in self._names):
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Empty(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def stand_in_for(*names: str) -> None:
    """Have imports of these packages and of their modules give empty ones, in this process and for good."""
    unhide(*names)
    sys.meta_path.insert(0, _Finder(names))

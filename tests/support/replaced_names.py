"""What tests and benchmarks replace by name, found in their source: each `owner.name = function`, with signatures.

Owners are modules and classes of this repository and of Megatron-LM. Nothing is imported, since much of what is
replaced can be imported on ranks alone. Where the source does not tell what replaces a function, `replace_name` of
`benchmarks.replaced` has to do it, which compares signatures in the run.
"""

import ast
import functools
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from inspect import Parameter, Signature
from pathlib import Path

__all__ = ["Replacement", "replacements"]

REPOSITORY = Path(__file__).resolve().parents[2]
_ROOTS = (REPOSITORY, *map(Path, sys.path))
_OWNERS = ("balancing", "balancing_tools", "benchmarks", "examples", "megatron", "scripts", "tests")
_ASSIGNS = re.compile(r"^ *(?!self\.)[A-Za-z_]\w*\.[\w.]+(,| = )|\bsetattr\(", re.M)
_Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
_Scope = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef | ast.Module


@dataclass(frozen=True)
class Module:
    """A file of source, or a folder without one."""

    name: str
    tree: ast.Module
    text: str = ""

    @property
    def module_name(self) -> str:
        return self.name


@dataclass(frozen=True)
class Found:
    """A function or a class, and the module that defines it."""

    node: _Function | ast.ClassDef
    module: Module
    bound: bool = False  # whether it is looked up in a class that gives its first argument

    @property
    def module_name(self) -> str:
        return self.module.name


@dataclass(frozen=True)
class Replacement:
    """Of one assignment.

    where: file and line.
    target: "module.name" or "module.Class.name" of what is replaced, "*" in place of a name that varies.
    original, replacement: signatures; None where the source does not tell.
    """

    where: str
    target: str
    original: Signature | None
    replacement: Signature | None = field(compare=False)


@functools.cache
def module_named(dotted: str) -> Module | None:
    """The module of this name if it is one of `_OWNERS`."""
    path = Path(*dotted.split("."))
    if path.parts[:1] not in {(owner,) for owner in _OWNERS}:
        return None
    for root in _ROOTS:
        for file in (root / path.with_suffix(".py"), root / path / "__init__.py"):
            if file.is_file():
                return Module(dotted, ast.parse(text := file.read_text(encoding="utf-8")), text)
    is_folder = any((root / path).is_dir() for root in _ROOTS)
    return Module(dotted, ast.Module([], [])) if is_folder else None


def _statements(scope: ast.AST) -> Iterator[ast.AST]:
    """Everything in a scope, without what is inside of functions and classes in it."""
    for node in ast.iter_child_nodes(scope):
        yield node
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)):
            yield from _statements(node)


@functools.cache
def _names(scope: _Scope, module: Module) -> dict[str, list[ast.AST]]:
    """What a scope binds: imports, definitions, and names that are given a value, as lists of their statements."""
    found: dict[str, list[ast.AST]] = {}
    for node in _statements(scope):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                found.setdefault(name, []).append(node)
            case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
                for alias in aliases:
                    name = alias.asname or alias.name
                    name = name.partition(".")[0] if isinstance(node, ast.Import) else name
                    found.setdefault(name, []).append(node)
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                found.setdefault(name, []).append(value)
            case ast.Assign(targets=[ast.Tuple(elts=targets)], value=ast.Tuple(elts=values)):
                for target, value in zip(targets, values, strict=False):
                    if isinstance(target, ast.Name):
                        found.setdefault(target.id, []).append(value)
    return found


def _imported(node: ast.Import | ast.ImportFrom, name: str, module: Module) -> "Module | Found | None":
    """What the import binds to `name`."""
    for alias in node.names:
        if isinstance(node, ast.Import):
            if (alias.asname or alias.name.partition(".")[0]) == name:
                return module_named(alias.name if alias.asname else name)
        elif (alias.asname or alias.name) == name:
            package = node.module or ""
            if node.level:
                parts = module.name.split(".")
                is_package = module_named(module.name) is module and _is_package(module.name)
                parts = parts[: len(parts) - node.level + is_package]
                package = ".".join([*parts, *([node.module] if node.module else [])])
            owner = module_named(package)
            return None if owner is None else attribute(owner, alias.name)
    return None


@functools.cache
def _is_package(dotted: str) -> bool:
    return any((root / Path(*dotted.split(".")) / "__init__.py").is_file() for root in _ROOTS)


def _value(node: ast.AST, name: str, scopes: tuple[_Scope, ...], module: Module) -> "Module | Found | None":
    """What a statement of `_names` binds."""
    match node:
        case ast.Import() | ast.ImportFrom():
            return _imported(node, name, module)
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef() | ast.Lambda():
            return Found(node, module)
        case ast.expr():
            return resolve(node, scopes, module)
    return None


_looked_up: set[tuple[str, str]] = set()


@functools.cache
def _of_module(dotted: str, name: str) -> "Module | Found | None":
    """What a module binds to a name by a statement; packages import names of their own modules, in circles, too."""
    owner = module_named(dotted)
    if owner is None or (dotted, name) in _looked_up:
        return None
    _looked_up.add((dotted, name))
    try:
        found = [_value(node, name, (owner.tree,), owner) for node in _names(owner.tree, owner).get(name, [])]
    finally:
        _looked_up.remove((dotted, name))
    return next((each for each in found if each is not None), None)


def attribute(owner: "Module | Found", name: str) -> "Module | Found | None":
    """`owner.name` of a module or a class."""
    if isinstance(owner, Module):
        return _of_module(owner.name, name) or module_named(f"{owner.name}.{name}")
    if not isinstance(owner.node, ast.ClassDef):
        return None
    for node in _names(owner.node, owner.module).get(name, []):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            return Found(node, owner.module, bound="classmethod" in _decorators(node))
        return None
    for base in owner.node.bases:
        of = resolve(base, (owner.module.tree,), owner.module)
        if of is not None and (found := attribute(of, name)) is not None:
            return found
    return None


def _decorators(node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    return [ast.unparse(each) for each in node.decorator_list]


def resolve(node: ast.expr, scopes: tuple[_Scope, ...], module: Module) -> "Module | Found | None":
    """What an expression is. scopes: around it, the innermost last."""
    match node:
        case ast.Lambda():
            return Found(node, module)
        case ast.Name(id=name):
            for depth in range(len(scopes), 0, -1):
                for bound in _names(scopes[depth - 1], module).get(name, []):
                    if bound is not node and (found := _value(bound, name, scopes[:depth], module)) is not None:
                        return found
        case ast.Attribute(value=value, attr=name):
            owner = resolve(value, scopes, module)
            return None if owner is None else attribute(owner, name)
        case (
            ast.Call(func=ast.Name(id="staticmethod") | ast.Attribute(attr="cache"), args=[inner])
            | ast.Call(func=ast.Call(func=ast.Name(id="wraps") | ast.Attribute(attr="wraps")), args=[inner])
        ):
            return resolve(inner, scopes, module)
        case ast.Call(func=func):
            made = resolve(func, scopes, module)
            if isinstance(made, Found) and isinstance(made.node, ast.FunctionDef):
                for each in _statements(made.node):
                    if isinstance(each, ast.Return) and isinstance(each.value, (ast.Name, ast.Lambda)):
                        found = resolve(each.value, (*_around(made), made.node), made.module)
                        return found if isinstance(found, Found) else None
    return None


def _around(found: Found) -> tuple[_Scope, ...]:
    """The scopes around a definition, the module first."""
    return next(scopes for node, scopes in _walk(found.module.tree, (found.module.tree,)) if node is found.node)


def _walk(node: ast.AST, scopes: tuple[_Scope, ...]) -> Iterator[tuple[ast.AST, tuple[_Scope, ...]]]:
    """All nodes, with the scopes around each."""
    left: list[tuple[ast.AST, tuple[_Scope, ...]]] = [(node, scopes)]
    while left:
        node, scopes = left.pop()
        for child in ast.iter_child_nodes(node):
            yield child, scopes
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)):
                left.append((child, (*scopes, child)))
            elif not isinstance(child, (ast.Name, ast.Constant, ast.Attribute)):
                left.append((child, scopes))


def signature(found: "Module | Found | None") -> Signature | None:
    """Of a function, or of what makes an object of a class; None where the source does not tell."""
    if not isinstance(found, Found):
        return None
    if isinstance(found.node, ast.ClassDef):
        if isinstance(made := attribute(found, "__init__"), Found):
            return signature(Found(made.node, made.module, bound=True))
        return None if found.node.bases or found.node.decorator_list else Signature()
    if isinstance(found.node, ast.FunctionDef) and any("property" in each for each in _decorators(found.node)):
        return None
    given = found.node.args
    positional = [*given.posonlyargs, *given.args]
    required = len(positional) - len(given.defaults)
    parameters = [
        Parameter(
            each.arg,
            Parameter.POSITIONAL_ONLY if at < len(given.posonlyargs) else Parameter.POSITIONAL_OR_KEYWORD,
            default=Parameter.empty if at < required else ...,
        )
        for at, each in enumerate(positional)
    ][found.bound :]
    parameters += [Parameter(given.vararg.arg, Parameter.VAR_POSITIONAL)] if given.vararg else []
    parameters += [
        Parameter(each.arg, Parameter.KEYWORD_ONLY, default=Parameter.empty if default is None else ...)
        for each, default in zip(given.kwonlyargs, given.kw_defaults, strict=True)
    ]
    parameters += [Parameter(given.kwarg.arg, Parameter.VAR_KEYWORD)] if given.kwarg else []
    return Signature(parameters)


def _assigned(node: ast.AST) -> Iterator[tuple[ast.expr, str | None, ast.expr]]:
    """Owner, name and new value of each attribute that a statement replaces. The name is None if it varies."""
    match node:
        case ast.Assign(targets=targets, value=value):
            for target in targets:
                pairs = [(target, value)]
                if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
                    pairs = list(zip(target.elts, value.elts, strict=False))
                yield from ((each.value, each.attr, own) for each, own in pairs if isinstance(each, ast.Attribute))
        case ast.Call(func=ast.Name(id="setattr"), args=[owner, ast.Constant(value=str(name)), value]):
            yield owner, name, value
        case ast.Call(func=ast.Name(id="setattr"), args=[owner, _, value]):
            yield owner, None, value


def _may_have(owner: "Module | Found", name: str) -> bool:
    """False if neither a module, nor a class or one that it is made from, has anything of this name."""
    if isinstance(owner, Module):
        return re.search(rf"\b{name}\b", owner.text) is not None
    if not isinstance(owner.node, ast.ClassDef):
        return True
    if re.search(rf"\bdef {name}\b|\.{name}\b|^ +{name} *[:=]", owner.module.text, re.M):
        return True
    bases = [resolve(base, (owner.module.tree,), owner.module) for base in owner.node.bases]
    return any(base is None or _may_have(base, name) for base in bases)


def replacements(file: Path) -> Iterator[Replacement]:
    """Those of functions and classes, in one file."""
    dotted, text = ".".join(file.relative_to(REPOSITORY).with_suffix("").parts), file.read_text(encoding="utf-8")
    if not _ASSIGNS.search(text):
        return
    module = Module(dotted, ast.parse(text))
    for node, scopes in _walk(module.tree, (module.tree,)):
        for owner, name, value in _assigned(node):
            of = resolve(owner, scopes, module)
            if of is None or of.module_name == dotted:
                continue
            own = of.name if isinstance(of, Module) else f"{of.module.name}.{getattr(of.node, 'name', '')}"
            where = f"{file.relative_to(REPOSITORY)}:{node.lineno}"
            if name is None:
                if not isinstance(value, ast.Constant):
                    yield Replacement(where, f"{own}.*", None, None)
            elif not _may_have(of, name) and (isinstance(of, Module) or signature(resolve(value, scopes, module))):
                yield Replacement(where, f"{own}.{name}, which is not there", None, None)
            elif isinstance(value, ast.Constant):
                continue  # which is not called
            elif (before := signature(attribute(of, name))) is not None:
                yield Replacement(where, f"{own}.{name}", before, signature(resolve(value, scopes, module)))

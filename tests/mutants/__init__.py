"""Faults planted in the wiring one at a time, to see that the tests notice each one that changes a number.

At most 42, for waits, groups, hooks and state that no test of one rank can see. A mutant names a place, a function by
its qualified name in whatever file, and a change of its syntax tree: a statement that is dropped, or an expression that
is another one. So it holds while code around it changes. Tests are named by their function alone.
`python -m tests.mutants` runs them (`scripts/mutants.sh`). For pure code, such as planners, use a tool from PyPI on
demand (CONTRIBUTING.md).
"""

import ast
import functools
import tomllib
from dataclasses import dataclass
from pathlib import Path

__all__ = ["REPOSITORY", "Mutant", "apply", "find", "mutated", "node_id", "read"]

REPOSITORY = Path(__file__).resolve().parents[2]
_SOURCES = ("balancing", "megatron/balanced", "examples")


@dataclass(frozen=True)
class Mutant:
    """One fault.

    name: what goes wrong.
    at: the function, as `Class.method`.
    drop: the statement that is left out: the callee of a call, or the target of an assignment.
    change: an expression, and the one in its place. Either `drop` or `change` is given; what it names is there once.
    why: what it does to numbers.
    killed_by: tests that fail with it, cheapest first, as `test_name` or `test_name[case]`.
    """

    name: str
    at: str
    why: str
    killed_by: tuple[str, ...]
    drop: str = ""
    change: tuple[str, str] = ("", "")


def read() -> list[Mutant]:
    """All mutants, in the order in which they stand in their table."""
    table = tomllib.loads((Path(__file__).parent / "mutants.toml").read_text())
    return [
        Mutant(**entry | {key: tuple(entry[key]) for key in ("killed_by", "change") if key in entry})
        for entry in table["mutant"]
    ]


def find(mutant: Mutant, repository: Path = REPOSITORY) -> Path:
    """The source file that the mutant changes. Raises ValueError if its function is not there once."""
    found = [
        path
        for folder in _SOURCES
        for path, text in _texts(repository / folder, "*.py")
        for _ in _functions(ast.parse(text), mutant.at)
    ]
    if len(found) != 1:
        raise ValueError(f"mutant '{mutant.name}' is stale: {mutant.at} stands {len(found)} times in {_SOURCES}")
    return found[0]


def mutated(mutant: Mutant, text: str) -> str:
    """The source `text` with the fault. Raises ValueError unless what it drops or changes is there once."""
    tree = ast.parse(text)
    (function,) = _functions(tree, mutant.at)
    plant = _Plant(mutant)
    plant.visit(function)
    if plant.planted != 1:
        raise ValueError(
            f"mutant '{mutant.name}' is stale: {mutant.at} has {mutant.drop or mutant.change[0]} {plant.planted} "
            "times, which must be once; write it anew, or drop it if what it broke is gone"
        )
    return ast.unparse(ast.fix_missing_locations(tree))


def apply(mutant: Mutant, repository: Path) -> None:
    """Plant the mutant in the tree at `repository`."""
    path = find(mutant, repository)
    path.write_text(mutated(mutant, path.read_text()))


def node_id(test: str) -> str:
    """The pytest node of `test`, a function with or without its case. Raises ValueError unless it is there once."""
    function = test.partition("[")[0]
    texts = _texts(REPOSITORY / "tests", "test_*.py")
    found = [path for path, text in texts for _ in range(text.count(f"\ndef {function}("))]
    if len(found) != 1:
        raise ValueError(f"a test {function} is there {len(found)} times; name one, not of a class, that is there once")
    return f"{found[0].relative_to(REPOSITORY)}::{test}"


class _Plant(ast.NodeTransformer):
    """Plants a mutant in a function, and counts how often."""

    def __init__(self, mutant: Mutant) -> None:
        self.planted = 0
        self._drop, (old, new) = mutant.drop, mutant.change
        self._old, self._new = (ast.dump(ast.parse(old, mode="eval").body), new) if old else ("", "")

    def visit(self, node: ast.AST) -> ast.AST:
        if self._drop and _dropped_as(node) == self._drop:
            self.planted += 1
            return ast.Pass()
        if self._old and isinstance(node, ast.expr) and ast.dump(node) == self._old:
            self.planted += 1
            return ast.parse(self._new, mode="eval").body
        return self.generic_visit(node)


def _dropped_as(node: ast.AST) -> str:
    """The name by which a mutant drops a statement; empty for one that it cannot drop."""
    match node:
        case ast.Expr(value=ast.Call(func=of)) | ast.Assign(targets=[of]) | ast.AugAssign(target=of):
            return ast.unparse(of)
        case _:
            return ""


def _functions(tree: ast.AST, at: str) -> list[ast.AST]:
    """The functions of the qualified name `at`."""
    found: list[ast.AST] = [tree]
    for name in at.split("."):
        found = [child for node in found for child in _definitions(node) if child.name == name]
    return [node for node in found if isinstance(node, ast.FunctionDef)]


def _definitions(node: ast.AST) -> list[ast.FunctionDef | ast.ClassDef]:
    """Functions and classes of a scope, those in its branches and loops as well."""
    found: list[ast.FunctionDef | ast.ClassDef] = []
    for child in ast.iter_child_nodes(node):
        found += [child] if isinstance(child, ast.FunctionDef | ast.ClassDef) else _definitions(child)
    return found


@functools.cache
def _texts(folder: Path, pattern: str) -> list[tuple[Path, str]]:
    return [(path, path.read_text()) for path in sorted(folder.rglob(pattern))]

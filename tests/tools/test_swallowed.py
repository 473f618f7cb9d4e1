"""No exception is lost: nothing ends a process on its way, and who catches all of them says what came or why not."""

import ast
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("balancing", "balancing_tools", "benchmarks", "examples", "megatron", "scripts", "tests")
_ENDS = {"os._exit", "os.abort", "sys.exit", "exit", "quit"}
_ALL = {"Exception", "BaseException"}


def _inside(body: Sequence[ast.AST]) -> Iterator[ast.AST]:
    """All nodes of statements, without those of functions that are only defined there."""
    left = list(body)
    while left:
        node = left.pop()
        yield node
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)):
            left.extend(ast.iter_child_nodes(node))


def _ends(node: ast.AST) -> bool:
    """Whether another error, or the end of the process, takes the place of the error that is on its way."""
    return isinstance(node, (ast.Raise, ast.Assert)) or (isinstance(node, ast.Call) and ast.unparse(node.func) in _ENDS)


def _says(handler: ast.ExceptHandler) -> bool:
    """Whether a handler goes on with the error: raises, gives it to something, or prints it."""
    return any(
        isinstance(node, ast.Raise)
        or (isinstance(node, ast.Name) and node.id == handler.name)
        or (isinstance(node, ast.Attribute) and node.attr in ("print_exc", "format_exc", "exception"))
        for node in _inside(handler.body)
    )


def _swallowed(text: str) -> Iterator[tuple[int, str]]:
    """Lines that lose exceptions, and how. A line that catches all and goes on has a comment that says why."""
    lines = text.splitlines()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Try, ast.TryStar)):
            yield from ((each.lineno, "ends in finally") for each in _inside(node.finalbody) if _ends(each))
            for handler in node.handlers:
                caught = {each.id for each in ast.walk(handler.type) if isinstance(each, ast.Name)} & _ALL \
                    if handler.type else _ALL  # fmt: skip
                if caught and not _says(handler) and "#" not in lines[handler.lineno - 1]:
                    yield handler.lineno, "catches all and says nothing"
                if caught and not _says(handler) and any(map(_ends, _inside(handler.body))):
                    yield handler.lineno, "ends and says nothing"
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("suppress"):
            caught = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)} & _ALL
            if caught and "#" not in lines[node.lineno - 1]:
                yield node.lineno, "catches all and says nothing"


def test_no_exception_is_lost():
    paths = [ROOT / "pretrain_gpt.py", *(path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py")))]
    assert len(paths) > 500
    found = [f"{path.relative_to(ROOT)}:{line} {how}" for path in paths for line, how in _swallowed(path.read_text())]
    assert not found


@pytest.mark.parametrize(
    ("text", "how"),
    [
        # As benchmarks.together had it, whose ranks hid every error behind another.
        ("try: run()\nfinally:\n    if missing: os._exit(1)", "ends in finally"),
        ("try: run()\nfinally:\n    assert not left", "ends in finally"),
        ("try: run()\nfinally:\n    def later(): os._exit(1)", ""),
        ("try: run()\nexcept BaseException: os._exit(1)  # at once", "ends and says nothing"),
        ("try: run()\nexcept BaseException:\n    traceback.print_exc()\n    os._exit(1)", ""),
        ("try: run()\nexcept (OSError, Exception): pass", "catches all and says nothing"),
        ("try: run()\nexcept: pass", "catches all and says nothing"),
        ("try: run()\nexcept Exception:  # the kernel does not run\n    best = inf", ""),
        ("try: run()\nexcept Exception as error: told.append(error)", ""),
        ("try: run()\nexcept OSError: pass", ""),
        ("with contextlib.suppress(Exception): run()", "catches all and says nothing"),
        ("with contextlib.suppress(OSError): run()", ""),
    ],
)
def test_what_counts_as_lost(text, how):
    assert [each for _, each in _swallowed(text)] == ([how] if how else [])

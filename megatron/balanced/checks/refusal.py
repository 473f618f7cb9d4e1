"""Error messages for a bad command line: one line that names the flags and the way out.

Messages of our own checks are shown as they are. Those of Megatron-LM name fields of its configs, or are only
conditions; here the fields become flags with the values that were given, and a way out is added.
"""

import argparse
import ast
import linecache
import re
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path

__all__ = ["explain", "know_flags", "know_values", "refused_by_megatron"]

_flags: dict[str, str] = {}  # name among the arguments -> the flag
_texts: set[str] = set()  # names of the arguments that take any text, such as a file
_values: argparse.Namespace | None = None

# A name in a message or a condition, its prefix in Megatron's code, and a mark that a value follows it.
_NAME = re.compile(r"(?<![\w./-])(args\.|self\.|config\.)?([a-z][a-z0-9_]*)(?![\w(/]|\.\w)(?==['\w]()|)")


def know_flags(parser: argparse.ArgumentParser) -> None:
    """Record the flag of each argument."""
    for action in parser._actions:
        if action.choices is None and action.type in (None, str):
            _texts.add(action.dest)
        for option in action.option_strings:
            if option == "--" + action.dest.replace("_", "-"):
                _flags[action.dest] = option


def know_values(args: argparse.Namespace) -> None:
    """Record the values that the user gave."""
    global _values
    _values = args


@dataclass(frozen=True)
class _Statement:
    """A raise or assert of Megatron-LM, and the condition of the branch that contains it."""

    node: ast.Assert | ast.Raise
    branch: ast.expr | None


def _megatrons_statement(error: BaseException) -> _Statement | None:
    """The raise or assert of Megatron-LM that caused `error`; None if it has another cause."""
    megatron = sys.modules.get("megatron.core")
    if megatron is None or megatron.__file__ is None or error.__traceback__ is None:
        return None
    frame = traceback.extract_tb(error.__traceback__)[-1]
    package = Path(megatron.__file__).parents[1]
    if not any(Path(frame.filename).is_relative_to(package / part) for part in ("core", "training")):
        return None
    line, branch = frame.lineno or 0, None
    for node in ast.walk(ast.parse("".join(linecache.getlines(frame.filename)))):  # inner nodes come later
        if isinstance(node, ast.If | ast.Assert | ast.Raise) and node.lineno <= line <= (node.end_lineno or 0):
            if not isinstance(node, ast.If):
                return _Statement(node, branch)
            branch = node.test
    return None


def refused_by_megatron(error: BaseException) -> bool:
    """Whether Megatron-LM raised this deliberately, or could not read a file that a flag names."""
    return _megatrons_statement(error) is not None or bool(_flags_of_file(error))


def _flags_of_file(error: BaseException) -> dict[str, None]:
    """The arguments whose value is the file that `error` is about."""
    if not isinstance(error, OSError) or error.filename is None or _values is None:
        return {}
    files = _texts & _flags.keys()
    return {name: None for name, value in vars(_values).items() if name in files and value == error.filename}


def explain(error: BaseException) -> str:
    """The message in one line; that of Megatron-LM with flags and a way out."""
    message = " ".join(str(error).split())
    if of_file := _flags_of_file(error):
        return f"{message}; {_way_out(of_file)}"
    statement = _megatrons_statement(error)
    if statement is None:
        return message or type(error).__name__
    named: dict[str, None] = {}
    text = _with_flags(message, named)
    if isinstance(statement.node, ast.Assert):
        condition = _with_flags(ast.unparse(statement.node.test), named)
        text = text or f"Megatron-LM demands: {condition}"
    if statement.branch is not None:
        _with_flags(ast.unparse(statement.branch), named)
    text = (text or type(error).__name__).rstrip(".")
    way_out = _way_out(named)
    return f"{text}; {way_out}" if way_out else text


def _with_flags(text: str, named: dict[str, None]) -> str:
    """`text` with names of arguments replaced by flags. The names are added to `named`."""

    def flag(match: re.Match[str]) -> str:
        prefix, name, value = match.groups()
        if name not in _flags or (prefix is None and value is None and "_" not in name):
            return match[0]
        named[name] = None
        return _flags[name]

    for option in re.findall(r"(?<![\w-])--([a-z][a-z0-9-]*)", text):
        if (name := option.replace("-", "_")) in _flags:
            named[name] = None
    return _NAME.sub(flag, text)


def _way_out(named: dict[str, None]) -> str:
    """The way out for the named arguments: change those that were given, give the others."""
    given, missing = [], []
    for name in named:
        value = getattr(_values, name, None)
        if value is None or value is False or value == []:
            missing.append(_flags[name])
        else:
            shown = " ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
            given.append(_flags[name] if value is True else f"{_flags[name]} {shown}")
    parts = [f"change or drop {' or '.join(given)}"] if given else []
    parts += [f"give {' or '.join(missing)}"] if missing else []
    return ", or ".join(parts)

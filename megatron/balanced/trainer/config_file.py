"""The file of `--balance-config`: settings by section, with or without a flag of their own.

    experts: {min_gain: 0.08}
    layers: {planner: diffusion, interval: 100}

A section is the config of a balancer or of the report, its entries are fields of this config. The file is YAML as
`yaml.safe_load` reads it. Aliases are refused, since they make a small file large.
"""

import dataclasses
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

__all__ = ["fields_of_file", "read_file"]

_MOST_BYTES = 1_000_000
_MOST_DEPTH = 3  # the file, its sections, and one more level, whose error names the field
_MOST_SHOWN = 100  # characters of a value in an error


def fields_of_file(config: type) -> dict[str, dataclasses.Field]:
    """Name -> field of a config. The switches are left out: balancers are switched on by flags only."""
    switches = ("enabled", "once")
    return {field.name: field for field in dataclasses.fields(config) if field.name not in switches}


def read_file(path: str, sections: Mapping[str, type]) -> dict[str, dict[str, Any]]:
    """The settings of a file: section -> field -> value.

    sections: the config of each section.

    Raises ValueError, in one line, for a file that cannot be read or is not YAML with sections, an unknown section or
    field, and a value of another type.
    """
    content, where = _parse(path), f"--balance-config {path}"
    if not isinstance(content, dict):
        raise ValueError(f"{where} has no sections; write some of {', '.join(sections)}")
    settings: dict[str, dict[str, Any]] = {}
    for section, values in content.items():
        if section not in sections:
            raise ValueError(f"{where}: {_short(repr(section))} is not a section; use {', '.join(sections)}")
        fields = fields_of_file(sections[section])
        known = f"its fields are {', '.join(fields)}"
        if not isinstance(values, dict):
            raise ValueError(f"{where}: {section} {_short(repr(values))} does not map fields to values; {known}")
        settings[section] = {}
        for name, value in values.items():
            if name not in fields:
                raise ValueError(f"{where}: {section} has no field {_short(repr(name))}; {known}")
            try:
                settings[section][name] = _typed(value, fields[name].type)
            except ValueError as error:
                raise ValueError(f"{where}: {section}.{name} {_short(repr(value))} {error}") from None
    return settings


def _parse(path: str) -> Any:
    try:
        if not Path(path).is_file():
            raise ValueError(f"--balance-config {path} is not a file; name one")
        with open(path, "rb") as file:
            data = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise ValueError(f"--balance-config {path} cannot be read: {error.strerror}; name a file") from error
    if len(data) > _MOST_BYTES:
        raise ValueError(f"--balance-config {path} has more than {_MOST_BYTES} bytes; it is not a file of settings")
    try:
        why = _refused(data)
        content = None if why else yaml.safe_load(data)
    except (yaml.YAMLError, ValueError) as error:  # ValueError: such as a number of thousands of digits
        raise ValueError(f"--balance-config {path} is not YAML: {_short(' '.join(str(error).split()))}") from error
    if why:
        raise ValueError(f"--balance-config {path} {why}")
    return content


def _refused(data: bytes) -> str | None:
    """Why YAML is refused before it is loaded: an alias, too deep nesting, or a duplicate name; None if it is not."""
    depth = 0
    for event in yaml.parse(data, Loader=yaml.SafeLoader):
        if isinstance(event, yaml.AliasEvent):
            return f"has an alias, *{_short(event.anchor)}; write its value in its place"
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > _MOST_DEPTH:
            return "is nested too deeply; it should have sections of fields"
    node = yaml.compose(data, Loader=yaml.SafeLoader)
    sections = node.value if isinstance(node, yaml.MappingNode) else []
    for mapping in (node, *(value for _, value in sections)):
        seen = set()
        for key, _ in mapping.value if isinstance(mapping, yaml.MappingNode) else ():
            if str(key.value) in seen:
                return f"has {_short(str(key.value))} twice; keep one"  # YAML would silently take the last
            seen.add(str(key.value))
    return None


def _short(text: str) -> str:
    return text if len(text) <= _MOST_SHOWN else text[: _MOST_SHOWN - 3] + "..."


def _typed(value: Any, kind: Any) -> Any:
    """A file's value in the type of its field. Raises ValueError for another type; its text goes after the value."""
    if isinstance(kind, types.UnionType):  # such as float | None
        kind, _ = kind.__args__
        if value is None:
            return None
    if kind is bool and isinstance(value, bool):
        return value
    if kind is int and isinstance(value, int) and not isinstance(value, bool):
        return value
    if kind is float and isinstance(value, (int, float, str)) and not isinstance(value, bool):
        try:
            return float(value)  # YAML reads 1e-3 as a string
        except (ValueError, OverflowError):
            pass
    if kind is str and isinstance(value, str):
        return value
    raise ValueError(f"is not {_KINDS[kind]}")


_KINDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a string",
}

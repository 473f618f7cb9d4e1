"""Recipe files: the flags of a training job as JSON or YAML.

A file has one recipe, flag to value, or several, name to recipe. Megatron-LM's own files keep the flags under ARGS or
MODEL_ARGS and the environment under ENV_VARS. The number of ranks is WORLD_SIZE, or what the name says, as in
"h100/bf16_256GPU_TP2PP8EP32".
"""

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

__all__ = ["Recipe", "read_recipes"]

_SECTIONS = ("ARGS", "MODEL_ARGS")


@dataclass(frozen=True)
class Recipe:
    """The flags of one training job.

    name: from the file, or of it.
    flags: name of a flag, with underscores -> its value. True and False are flags without a value, given and not given.
    environment: variables that the job sets.
    ranks: how many the name tells, None where it does not.
    """

    name: str
    flags: dict[str, Any]
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def ranks(self) -> int | None:
        told = re.search(r"(\d+)[ _-]?GPU", self.name, re.I)
        return int(told[1]) if told else None


def read_recipes(path: Path) -> list[Recipe]:
    """The recipes of a .json, .yaml or .yml file. Raises ValueError for a file that is absent or has none."""
    content = _parse(path)
    if not isinstance(content, dict) or not content:
        raise ValueError(f"{path} is not a recipe: it should map flags to values, or names to recipes")
    name = str(path.with_suffix(""))
    if any(section in content for section in _SECTIONS):
        return [_recipe(path, name, content)]
    nested = [isinstance(value, dict) for value in content.values()]
    if all(nested):
        return [_recipe(path, str(each), value) for each, value in content.items()]
    return [_recipe(path, name, content)]


def _parse(path: Path) -> Any:
    if path.suffix not in (".json", ".yaml", ".yml"):
        raise ValueError(f"{path} is not a recipe file: its name must end in .json, .yaml or .yml")
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}; name a file that can") from error
    try:
        return json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except (ValueError, yaml.YAMLError) as error:
        raise ValueError(f"{path} is not {path.suffix[1:].upper()}: {' '.join(str(error).split())}") from error


def _recipe(path: Path, name: str, content: dict[str, Any]) -> Recipe:
    section = next((section for section in _SECTIONS if section in content), None)
    flags = content if section is None else content[section]
    environment = {} if section is None else content.get("ENV_VARS") or {}
    where = f"{path}" if section is None else f"{path}, {section}"
    if not isinstance(flags, dict) or not flags or not isinstance(environment, dict):
        raise ValueError(f"{where} of {name} should map names to values")
    known = {}
    for flag, value in flags.items():
        if isinstance(value, dict):
            raise ValueError(f"{where} of {name}: {flag} is a mapping; a flag has a value or a list of values")
        known[str(flag).strip().lstrip("-").replace("-", "_")] = value
    return Recipe(name, known, {str(variable): str(value) for variable, value in environment.items()})

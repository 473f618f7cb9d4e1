"""Recipe files: the flags of a training job as JSON or YAML.

A file has one recipe, flag to value, or several, name to recipe. Megatron-LM's own files keep the flags under ARGS or
MODEL_ARGS and the environment under ENV_VARS. The name says the number of ranks, as in "h100/bf16_256GPU_TP2PP8EP32".
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
    """The recipes of a .json, .yaml or .yml file."""
    text = path.read_text(encoding="utf-8")
    content = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    if not any(section in content for section in _SECTIONS) and all(
        isinstance(each, dict) for each in content.values()
    ):
        return [_recipe(str(name), each) for name, each in content.items()]
    return [_recipe(str(path.with_suffix("")), content)]


def _recipe(name: str, content: dict[str, Any]) -> Recipe:
    flags = next((content[section] for section in _SECTIONS if section in content), content)
    environment = {} if flags is content else content.get("ENV_VARS") or {}
    known = {str(flag).strip().lstrip("-").replace("-", "_"): value for flag, value in flags.items()}
    return Recipe(name, known, {str(variable): str(value) for variable, value in environment.items()})

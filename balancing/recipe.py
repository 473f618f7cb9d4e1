"""Recipe files: the flags of a training job as JSON or YAML.

A file has one recipe, flag to value, or several, name to recipe. Megatron-LM's own files keep the flags under ARGS or
MODEL_ARGS and the environment under ENV_VARS. The number of ranks is WORLD_SIZE, or what the name says, as in
"h100/bf16_256GPU_TP2PP8EP32".
"""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from balancing.files import parse_json, read_text

__all__ = ["Recipe", "read_recipes"]

MOST_NODES = 100_000  # of a YAML file

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
        text = read_text(path)
    except ValueError as error:
        raise ValueError(f"{path} {error}") from error
    if path.suffix == ".json":
        try:
            return parse_json(text)
        except ValueError as error:
            raise ValueError(f"{path} is not JSON: {error}") from error
    try:
        import yaml
    except ImportError as error:
        raise ValueError(f"{path} needs PyYAML, which is not installed; pip install pyyaml") from error
    loader = yaml.SafeLoader(text)
    try:
        node = loader.get_single_node()
        if (nodes := _expanded(node, {})) > MOST_NODES:
            raise ValueError(f"{path} has {nodes:,} values once its aliases are written out, at most {MOST_NODES:,} "
                             "are read; write fewer")  # fmt: skip
        return None if node is None else loader.construct_document(node)
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    except RecursionError as error:
        raise ValueError(f"{path} is not a recipe: its values are nested too deeply, or in themselves") from error
    finally:
        loader.dispose()


def _expanded(node: Any, known: dict[int, int]) -> int:
    """How many values `node` of YAML has with aliases written out. Raises RecursionError for one that holds itself."""
    if id(node) not in known:
        held = getattr(node, "value", None)
        parts = held if isinstance(held, list) else []  # nodes, or pairs of a key and its value
        pairs = [part if isinstance(part, tuple) else (part,) for part in parts]
        known[id(node)] = 1 + sum(_expanded(each, known) for pair in pairs for each in pair)
    return known[id(node)]


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

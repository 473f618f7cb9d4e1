"""Where Transformer Engine and what it imports are installed, and how to tell that they are not."""

import os
import re
import sys
from importlib.metadata import PathDistribution
from pathlib import Path

__all__ = ["FOLDER", "VERSION", "add_to_path", "why_missing"]

LIST = Path(__file__).resolve().parents[3] / "scripts" / "transformer_engine.txt"
# The signatures of the C++ module are positional and change between versions.
VERSION = re.findall(r"^transformer_engine==(.+)$", LIST.read_text(), re.M)[0]
FOLDER = Path(os.environ.get("TRANSFORMER_ENGINE_CPU", Path(sys.prefix) / "transformer_engine"))


def why_missing() -> str | None:
    """Why tests with Transformer Engine cannot run; None if they can."""
    how = "scripts/test.sh installs it"
    if not (FOLDER / "transformer_engine").is_dir():
        return f"Transformer Engine is not in {FOLDER}; {how}"
    found = {PathDistribution(path).version for path in FOLDER.glob("transformer_engine-*.dist-info")}
    if found != {VERSION}:
        return f"{FOLDER} holds Transformer Engine {', '.join(sorted(found)) or '?'}, not {VERSION}; {how}"
    return None


def add_to_path() -> None:
    """Have imports find the packages. Last, so that what is installed otherwise stays what is imported."""
    if str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))

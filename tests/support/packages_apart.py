"""Packages that `scripts/test.sh` installs into folders of their own, for the tests that put them on their path."""

import os
import re
import sys
from importlib import metadata
from importlib.metadata import PathDistribution
from pathlib import Path

__all__ = ["add_to_path", "folder", "unhide", "version", "why_missing", "why_not_interpreted"]

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


def folder(name: str) -> Path:
    """Where the packages of scripts/NAME.txt are."""
    return Path(os.environ.get(f"{name.upper()}_APART", Path(sys.prefix) / name))


def version(name: str, package: str | None = None) -> str:
    """The version of `package`, which is `name` if not given, that scripts/NAME.txt asks for."""
    pattern = (package or name).replace("_", "[-_]")
    return re.findall(rf"^{pattern}==(.+)$", (SCRIPTS / f"{name}.txt").read_text(), re.M)[0]


def why_missing(name: str, title: str, package: str | None = None) -> str | None:
    """Why tests cannot import `package` of scripts/NAME.txt, which is `name` if not given, called `title`; None if they
    can."""
    place, how = folder(name), "scripts/test.sh installs it"
    found = {PathDistribution(path).version for path in place.glob(f"{package or name}-*.dist-info")}
    if not found:
        return f"{title} is not in {place}; {how}"
    if found != {version(name, package)}:
        return f"{place} holds {title} {', '.join(sorted(found))}, not {version(name, package)}; {how}"
    return None


def why_not_interpreted() -> str | None:
    """Why Triton does not interpret loops over its own numbers here, None if it does. Compiled kernels do not care."""
    found = [tuple(map(int, re.findall(r"\d+", metadata.version(package))[:2])) for package in ("triton", "numpy")]
    if found[0] < (3, 7) and found[1] >= (2, 5):
        return f"the interpreter of Triton {found[0][0]}.{found[0][1]} fails with NumPy 2.5 and later"
    return None


def unhide(*names: str) -> None:
    """Have imports find packages that the CPU device hides (`megatron.balanced.cpu.packages`)."""
    for name in names:
        if sys.modules.get(name, name) is None:
            del sys.modules[name]


def add_to_path(name: str) -> None:
    """Have imports find the packages. Last, so that what is installed otherwise stays what is imported."""
    unhide(name)
    if str(folder(name)) not in sys.path:
        sys.path.append(str(folder(name)))

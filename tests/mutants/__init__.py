"""Faults planted in the wiring one at a time, to see that the tests notice each one that changes a number.

The general tools (mutmut, cosmic-ray, mutatest) were looked at: they flip operators and constants in a single process,
a thousand mutants for each interesting one, and know neither which tests of several ranks to run nor a wait, a group or
a hook; so the mutants here are written by hand, as data, and a short runner carries them out.

A mutant names no file: its old text stands exactly once in all source files, wherever they are moved to. Tests are
named by their function alone for the same reason. `python -m tests.mutants` runs them (`scripts/mutants.sh`).
"""

import functools
import tomllib
from dataclasses import dataclass
from pathlib import Path

__all__ = ["REPOSITORY", "Mutant", "apply", "find", "node_id", "read"]

REPOSITORY = Path(__file__).resolve().parents[2]
_SOURCES = ("balancing", "megatron/balanced")


@dataclass(frozen=True)
class Mutant:
    """One fault. old, new: the text it replaces and what with. why: what it does to numbers, or why nothing.

    killed_by: tests that fail with it, cheapest first, as `test_name` or `test_name[case]`; empty for one that changes
    no number that a CPU could show, which is listed and not run.
    """

    name: str
    old: str
    new: str
    why: str
    killed_by: tuple[str, ...] = ()


def read() -> list[Mutant]:
    """All mutants, by file and in the order in which they stand there."""
    found = []
    for file in sorted(Path(__file__).parent.glob("*.toml")):
        for entry in tomllib.loads(file.read_text())["mutant"]:
            texts = {key: entry[key].rstrip("\n") for key in ("old", "new")}
            found.append(Mutant(**entry | texts | {"killed_by": tuple(entry.get("killed_by", ()))}))
    return found


def find(mutant: Mutant, repository: Path = REPOSITORY) -> Path:
    """The source file that the mutant changes. Raises ValueError for a stale one."""
    sources = [text for folder in _SOURCES for text in _texts(repository / folder, "*.py")]
    found = [path for path, text in sources for _ in range(text.count(mutant.old))]
    if len(found) != 1:
        raise ValueError(
            f"mutant '{mutant.name}' is stale: its old text stands {len(found)} times in {', '.join(_SOURCES)}, which "
            "must be once; write it anew, or drop it if what it broke is gone"
        )
    return found[0]


def apply(mutant: Mutant, repository: Path) -> None:
    """Plant the mutant in the tree at `repository`."""
    path = find(mutant, repository)
    path.write_text(path.read_text().replace(mutant.old, mutant.new))


def node_id(test: str) -> str:
    """The pytest node of `test`, a function with or without its case. Raises ValueError unless it is there once."""
    function = test.partition("[")[0]
    texts = _texts(REPOSITORY / "tests", "test_*.py")
    found = [path for path, text in texts for _ in range(text.count(f"\ndef {function}("))]
    if len(found) != 1:
        raise ValueError(f"a test {function} is there {len(found)} times; name one, not of a class, that is there once")
    return f"{found[0].relative_to(REPOSITORY)}::{test}"


@functools.cache
def _texts(folder: Path, pattern: str) -> list[tuple[Path, str]]:
    return [(path, path.read_text()) for path in sorted(folder.rglob(pattern))]

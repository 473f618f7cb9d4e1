"""Which published figures are older than the code that they measured.

    python -m benchmarks.since

Each row and paragraph of benchmarks/README.md names the commits of its figures and the command that repeats them. For
each command this lists, by commit, the day and how many of the files that the command imports have changed since, the
nearest of them first. Files are compared by the hash of their syntax tree, so that comments, docstrings, layout and
names of files do not count. A changed file need not change a figure; with none changed, a figure is of this commit.

Exit code 1 if figures are of code more than `MOST_BACK` commits back, of which a file has changed. Such a row is
repeated, dropped, or says in its text why it may stand: "(stands: REASON)".
"""

import argparse
import ast
import hashlib
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

__all__ = ["Age", "ages", "figures_of", "imported"]

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "benchmarks" / "README.md"
MOST_BACK = 400  # commits
_OURS = re.compile(r"(?:balancing(?:_tools)?|benchmarks|examples|megatron\.balanced|tests\.support)(?:\.\w+)*")
_COMMIT = re.compile(r"\b(?=[a-f\d]*[a-f])(?=[a-f\d]*\d)[a-f\d]{7}\b")


@dataclass(frozen=True)
class Age:
    """How old the figures of a command are.

    day: of the commit, as "2026-11-26". files: how many the command imports. changed: those whose code differs now,
    nearest to the command first. back: commits since. stands: why it may be older than the rule says, or "".
    """

    command: str
    commit: str
    day: str
    files: int
    changed: tuple[str, ...]
    back: int = 0
    stands: str = ""

    @property
    def too_old(self) -> bool:
        return bool(self.changed) and self.back > MOST_BACK and not self.stands

    def __str__(self) -> str:
        nearest = f": {', '.join(self.changed[:3])}{', ...' if len(self.changed) > 3 else ''}" if self.changed else ""
        mark = "  TOO OLD" if self.too_old else f" (stands: {self.stands})" if self.stands else ""
        return (
            f"{self.day} {self.commit} {self.command}: {self.back} commits back, {len(self.changed)} of {self.files} "
            f"files changed{nearest}{mark}"
        )


def figures_of(page: str) -> list[tuple[str, str, str]]:
    """Command, commit and why they may stand, of each row and paragraph of a page that names the first two, in order
    and without repetition."""
    blocks = re.split(r"\n\n|\n(?=[|])", page)
    return list(dict.fromkeys((module, commit, " ".join("; ".join(re.findall(r"\(stands: ([^)]+)\)", block)).split()))
                              for block in blocks
                              for module in re.findall(r"python -m (benchmarks(?:\.\w+)*)", block)
                              for commit in _COMMIT.findall(block)))  # fmt: skip


def _file(root: Path, module: str) -> Path | None:
    """The file of a module under `root`, or None if it is none of its modules."""
    path = root.joinpath(*module.split("."))
    return next((file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()), None)


@cache
def _names(file: Path, package: str) -> tuple[str, ...]:
    """Modules that a program imports or starts by name, and scripts that it starts, in the order of the text."""
    return tuple(_named(ast.parse(file.read_text()), package))


def _named(tree: ast.AST, package: str) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".")[: -(node.level - 1) or None] if node.level else []
            module = ".".join([*parts, *filter(None, [node.module])])
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


@cache
def imported(module: str, root: Path = ROOT) -> list[Path]:
    """The files under `root` that a command `python -m module` may run, nearest first: breadth-first over imports,
    also those inside functions, and over modules and scripts that are started by name."""
    found: dict[Path, None] = {}
    waiting = [module, f"{module}.__main__"]
    while waiting:
        name = waiting.pop(0)
        if name.endswith(".py") and "\n" not in name:
            file = root / name if (root / name).is_file() else None
        else:
            file = _file(root, name) if _OURS.fullmatch(name) else None
        if file is None or file in found:
            continue
        found[file] = None
        parts = file.relative_to(root).with_suffix("").parts
        waiting += _names(file, ".".join(parts[:-1]))
        waiting += [".".join(parts[:n]) for n in range(1, len(parts))]
    return list(found)


@cache
def _hash(source: str) -> str:
    """Of a program without docstrings, comments and layout."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        documented = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        if documented and ast.get_docstring(node) is not None:
            del node.body[0]
    return hashlib.sha256(ast.dump(tree).encode()).hexdigest()


def _git(root: Path, *arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=60)
    if done.returncode:
        raise ValueError(f"git {arguments[0]}: {done.stderr.strip().partition(chr(10))[0]}; needs a clone with history")
    return done.stdout


def _sources(root: Path, commit: str) -> dict[str, str]:
    """Text of each Python file of a commit, by path."""
    rows = [line.split(None, 3) for line in _git(root, "ls-tree", "-r", commit).splitlines()]
    blobs = {path: blob for _, kind, blob, path in rows if kind == "blob" and path.endswith(".py")}
    done = subprocess.run(["git", "-C", str(root), "cat-file", "--batch"], input="\n".join(blobs.values()).encode(),
                          capture_output=True, timeout=60, check=True)  # fmt: skip
    texts, rest = {}, done.stdout
    for path in blobs:
        head, _, rest = rest.partition(b"\n")
        size = int(head.split()[2])
        texts[path], rest = rest[:size].decode(), rest[size + 1 :]
    return texts


def ages(page: str, root: Path = ROOT) -> list[Age]:
    """Age of the figures of a page, the oldest first. Raises ValueError if git does not know a commit."""
    then: dict[str, tuple[str, int, dict[str, str]]] = {}
    found = []
    for module, commit, stands in figures_of(page):
        if commit not in then:
            day, back = (
                _git(root, "log", "-1", "--format=%cs", commit),
                _git(root, "rev-list", "--count", f"{commit}.."),
            )
            then[commit] = day.strip(), int(back), _sources(root, commit)
        day, commits, sources = then[commit]
        files = imported(module, root)
        changed = []
        hashes: set[str] = set()
        for file in files:
            name, text = str(file.relative_to(root)), file.read_text()
            if name in sources and (sources[name] == text or _hash(sources[name]) == _hash(text)):
                continue
            hashes = hashes or {_hash(source) for source in sources.values()}
            if _hash(text) not in hashes:
                changed.append(name)
        found.append(Age(f"python -m {module}", commit, day, len(files), tuple(changed), commits, stands))
    return sorted(found, key=lambda age: age.day)


def main() -> int:
    """Run the command line; returns the exit code."""
    argparse.ArgumentParser(
        prog="python -m benchmarks.since", description=(__doc__ or "").partition("\n")[0]
    ).parse_args()
    try:
        found = ages(PAGE.read_text())
    except ValueError as error:
        print(f"since: {error}", file=sys.stderr)
        return 2
    print(*found, sep="\n")
    old = sum(age.too_old for age in found)
    print(f"{len(found)} figures, {old} of changed code more than {MOST_BACK} commits back")
    return 1 if old else 0


if __name__ == "__main__":
    sys.exit(main())

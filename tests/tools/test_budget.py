"""Lines of Python: they may only fall. Whoever must raise a limit writes in the same commit what the lines bought."""

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.patience import PATIENCE

REPOSITORY = Path(__file__).resolve().parents[2]
# Folders -> most lines of their Python files, rounded up to hundreds.
MOST = {
    ("balancing", "megatron"): 44_500,
    ("balancing_tools",): 4_900,
    ("tests",): 52_400,
    ("benchmarks", "scripts"): 12_900,
}


@pytest.mark.parametrize("folders", MOST, ids=" and ".join)
def test_lines_may_only_fall(folders):
    lines = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in _files(folders))
    assert 0 < lines <= MOST[folders], (
        f"{' and '.join(folders)} have {lines:,} lines of Python, and at most {MOST[folders]:,} are allowed. Drop as "
        "many elsewhere, or raise the limit here and write in the same commit what the lines bought"
    )


def _files(folders: tuple[str, ...]) -> list[Path]:
    """The Python files that git tracks, or would if all were added; without a repository of git, all that there are."""
    names: list[str] = []
    if shutil.which("git") is not None:
        command = ["git", "ls-files", "-z", "-co", "--exclude-standard", "--", *folders]
        done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=PATIENCE)
        names = [name for name in done.stdout.split("\0") if name.endswith(".py")]
    tracked = [path for name in names if (path := REPOSITORY / name).is_file()]
    return tracked or [path for folder in folders for path in (REPOSITORY / folder).rglob("*.py")]

"""Ages of published figures: which files a command runs, and which of them have changed since a commit."""

import importlib.util
import subprocess
from pathlib import Path

import pytest

from benchmarks import since
from benchmarks.since import PAGE, ROOT, ages, figures_of, imported

FIRST = "f1257a0"  # a tag that reads like a commit, whatever the commit is called
ROW = f"| steps | 1.2 | [{FIRST}](log/steps.md) | `python -m benchmarks.steps --quick` |\n"


def _git(folder: Path, *arguments: str) -> None:
    identity = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
    subprocess.run(["git", "-C", str(folder), *identity, *arguments], check=True, capture_output=True, timeout=60)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A repository in which a command imports one module, and starts another, a function of which imports a third."""
    for name, text in {
        "benchmarks/__init__.py": "",
        "benchmarks/steps.py": '"""Steps."""\nfrom balancing import plan\n\nRANK = "benchmarks.rank"\n',
        "benchmarks/rank.py": "def main():\n    from balancing.cost import seconds\n    seconds()\n",
        "benchmarks/other.py": "VALUE = 1\n",
        "balancing/__init__.py": "",
        "balancing/plan.py": "def plan():\n    return 1\n",
        "balancing/cost.py": 'def seconds():\n    """Of a step."""\n    return 1  # one\n',
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    for command in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "first"], ["tag", FIRST]):
        _git(tmp_path, *command)
    return tmp_path


def test_a_command_runs_what_it_imports_anywhere_and_what_it_starts_by_name(tree: Path) -> None:
    names = [str(file.relative_to(tree)) for file in imported("benchmarks.steps", tree)]
    assert names[0] == "benchmarks/steps.py"
    assert set(names) == {"benchmarks/steps.py", "benchmarks/__init__.py", "benchmarks/rank.py",
                          "balancing/__init__.py", "balancing/plan.py", "balancing/cost.py"}  # fmt: skip


def test_a_figure_is_of_this_code_if_only_comments_names_and_other_files_changed(tree: Path) -> None:
    (tree / "balancing/cost.py").write_text("# seconds\ndef seconds():\n    return (\n        1\n    )\n")
    (tree / "benchmarks/other.py").write_text("VALUE = 2\n")
    (tree / "benchmarks/__init__.py").unlink()
    (age,) = ages(ROW, tree)
    assert (age.command, age.commit, age.files, age.changed) == ("python -m benchmarks.steps", FIRST, 5, ())


def test_a_commit_that_git_does_not_know_is_named(tree: Path) -> None:
    with pytest.raises(ValueError, match=r"'abcdef0'.*needs a clone with history"):
        ages(ROW.replace(FIRST, "abcdef0"), tree)


def test_the_page_of_figures_names_a_commit_for_each_command_that_it_has() -> None:
    found = figures_of(PAGE.read_text())
    assert len(found) >= 30
    assert all(importlib.util.find_spec(module) is not None for module, *_ in found)


def test_old_figures_are_repeated_or_say_why_they_stand(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tree / "balancing/plan.py").write_text("def plan():\n    return 2\n")
    _git(tree, "commit", "-q", "-a", "-m", "second")
    monkeypatch.setattr(since, "MOST_BACK", 1)
    (age,) = ages(ROW, tree)
    assert (age.back, age.too_old) == (1, False)
    monkeypatch.setattr(since, "MOST_BACK", 0)
    (age,) = ages(ROW, tree)
    assert age.too_old and str(age).endswith("balancing/plan.py  TOO OLD")
    (age,) = ages(ROW.replace("1.2 |", "1.2 (stands: the card is gone) |"), tree)
    assert not age.too_old and age.stands == "the card is gone"


def test_no_published_figure_is_too_old() -> None:
    try:
        found = ages(PAGE.read_text(), ROOT)
    except ValueError as error:  # a clone without history
        pytest.skip(str(error))
    # The command asks for a figure 100 commits before: one commit more fails no suite by surprise.
    assert not [str(age) for age in found if age.too_old and age.back > since.MOST_BACK + 100]

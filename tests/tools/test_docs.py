"""Documentation is checked: links resolve, commands name modules and flags that exist, pages are short."""

import ast
import importlib.util
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron.balanced.trainer.checks.megatron import MEGATRON_VERSIONS
from tests.support.command import run_python

REPOSITORY = Path(__file__).parents[2]
PAGES = [
    *REPOSITORY.glob("*.md"),
    *REPOSITORY.glob("docs/**/*.md"),
    *REPOSITORY.glob("benchmarks/**/*.md"),
    *REPOSITORY.glob("scripts/**/*.md"),
    *REPOSITORY.glob(".github/**/*.md"),
]
LOG = REPOSITORY / "benchmarks" / "log"
LOG_PAGES = [page for page in sorted(LOG.glob("*.md")) if page.name != "README.md"]


def _name(page: Path) -> str:
    return str(page.relative_to(REPOSITORY))


def _anchors(page: Path) -> set[str]:
    """The anchors that a forge makes of a page's headings."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_links_lead_somewhere(page):
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith(("http://", "https://")):
            continue
        path, _, anchor = target.partition("#")
        linked = page.parent / path if path else page
        assert linked.exists(), f"{_name(page)} links to {target}"
        assert not anchor or anchor in _anchors(linked), f"{_name(page)} links to {target}: no such heading"


def test_every_page_is_part_of_the_site():
    listed = set(re.findall(r": ([\w/]+\.md)$", (REPOSITORY / "mkdocs.yml").read_text(), re.M))
    pages = {str(path.relative_to(REPOSITORY / "docs")) for path in REPOSITORY.glob("docs/**/*.md")}
    assert listed == pages | {"index.md"}, "README.md is index.md"


def test_links_out_of_the_site_become_paths():
    spec = importlib.util.spec_from_file_location("docs_links", REPOSITORY / "scripts/docs_links.py")
    assert spec and spec.loader
    hook = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hook)

    def mended(page: str, text: str) -> str:
        return hook.on_page_markdown(text, SimpleNamespace(file=SimpleNamespace(src_uri=page)))

    assert mended("index.md", "[a](docs/layers.md#flags)") == "[a](layers.md#flags)"
    assert mended("internals/layers.md", "[a](../layers.md) [b](#c)") == "[a](../layers.md) [b](#c)"
    assert mended("layers.md", "[log](../benchmarks/log/README.md)") == "log (`benchmarks/log/README.md`)"
    assert mended("layers.md", "[first](../README.md#install)") == "[first](index.md#install)"
    with pytest.raises(ValueError, match=r"links to nowhere\.md, which is not there"):
        mended("layers.md", "[a](nowhere.md)")


def _entries(page: Path) -> list[str]:
    """The days of a page's entries, as its headings have them."""
    return re.findall(r"^## (\d{4}-\d\d-\d\d): ", page.read_text(), re.M)


def test_the_log_of_measurements_is_listed_newest_first():
    listed = re.findall(r"^- \[(.+)\]\((.+)\), (\S+): .+$", (LOG / "README.md").read_text(), re.M)
    assert sorted(name for _, name, _ in listed) == sorted(page.name for page in LOG_PAGES)
    days = [day for _, _, day in listed]
    assert days == sorted(days, reverse=True)
    for title, name, day in listed:
        assert (LOG / name).read_text().startswith(f"# {title}\n"), name
        assert day == _entries(LOG / name)[0], name


@pytest.mark.parametrize("page", LOG_PAGES, ids=_name)
def test_a_page_of_the_log_has_its_newest_entry_first_and_what_was_overturned_last(page):
    assert re.match(r"[a-z][a-z0-9-]*\.md$", page.name), "a page is named for its subject"
    days, headings = _entries(page), re.findall(r"^## (.+)$", page.read_text(), re.M)
    titles = re.findall(r"^# (.+)$|^## \S+: (.+)$", page.read_text(), re.M)
    assert all(len((title or entry).split()) <= 8 for title, entry in titles), "a verdict has at most eight words"
    assert days and days == sorted(days, reverse=True)
    assert headings[len(days) :] in ([], ["Overturned"]), "an entry begins with its day"
    _, _, overturned = page.read_text().partition("\n## Overturned\n\n")
    for line in re.sub(r"\n  ", " ", overturned).splitlines():
        assert re.match(r"- \d{4}-\d\d-\d\d: ", line), line
        assert re.search(r"; (?:overturned|replaced) (?:on \d{4}-\d\d-\d\d|the same day)", line), line


def test_the_log_is_short():
    assert len(LOG_PAGES) <= 15
    assert sum(len(page.read_text().splitlines()) for page in LOG.glob("*.md")) <= 1500


def test_the_page_of_newest_figures_is_one_page():
    assert len((REPOSITORY / "benchmarks/README.md").read_text().splitlines()) <= 160


@pytest.mark.parametrize("page", ["benchmarks/README.md", "docs/results.md"])
def test_tables_of_figures_are_narrow(page):
    lines = (REPOSITORY / page).read_text().splitlines()
    rows = [line.strip("|").split("|") for line in lines if line.startswith("| ")]
    assert rows and max(map(len, rows)) <= 8
    assert not [cell for row in rows for cell in row if len(cell.strip()) > 60]


@pytest.fixture(scope="module")
def flags():
    """Flags of pretrain_gpt.py and of dynamic models as --help prints them, and those that scripts and modules here
    name."""
    # A process of its own, for it chooses a device.
    done = run_python("examples/dynamic_models/pretrain.py", "--help")
    assert done.returncode == 0, done.stderr
    own = set(re.findall(r"^  (?:-\w, )?(--[a-z0-9-]+)", done.stdout, re.M))
    assert {"--balance-experts", "--num-layers", "--early-exit-layers"} <= own
    sources = [
        path
        for part in ("balancing", "balancing_tools", "benchmarks", "megatron", "tests/support")
        for path in REPOSITORY.glob(f"{part}/**/*.py")
    ]
    sources += [REPOSITORY / "tests/conftest.py", *(path for path in REPOSITORY.glob("scripts/**/*") if path.is_file())]
    return own | {flag for path in sources for flag in re.findall(r"--[a-z0-9-]+", path.read_text())}


GUIDES = [REPOSITORY / "README.md", REPOSITORY / "CONTRIBUTING.md", *REPOSITORY.glob("docs/**/*.md")]
FOREIGN = {  # of torchrun, git, verl, slime and ms-swift
    "--standalone", "--follow", "--config-name", "--balance-data", "--colocate", "--custom-megatron-init-path",
    "--custom-megatron-before-train-step-hook-path", "--callbacks", "--external",
}  # fmt: skip


@pytest.mark.parametrize("page", GUIDES, ids=_name)
def test_flags_exist(page, flags):
    named = set(re.findall(r"(?<![\w/-])--[a-z][a-z0-9-]*", page.read_text()))
    assert not named - flags - FOREIGN


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_commands_name_modules_that_are_there(page):
    for module in re.findall(r"python -m ((?:balancing|benchmarks|tests)[\w.]*)", page.read_text()):
        name = module.rstrip(".").replace(".NAME", "")
        assert importlib.util.find_spec(name) is not None, module


@pytest.mark.parametrize("page", [*GUIDES, REPOSITORY / "benchmarks/README.md"], ids=_name)
def test_paths_name_what_is_there(page):
    text = page.read_text()
    created = re.findall(r"^```python file=(\S+)", text, re.M)
    folders = "scripts|tests|balancing|balancing_tools|benchmarks|megatron|examples|docs"
    for path in re.findall(rf"(?<![\w/.])(?:{folders})/[\w./-]+\w", text):
        found = (REPOSITORY / path).exists() or (page.parent / path).exists() or path in created
        assert found, f"{_name(page)} names {path}"


@pytest.mark.parametrize("page", GUIDES, ids=_name)
def test_python_of_a_page_names_what_there_is(page):
    """Also where a snippet is a part of a program, which cannot run by itself."""
    for snippet in re.findall(r"^```py(?:thon)?\b[^\n]*\n(.*?)^```", page.read_text(), re.M | re.S):
        for node in ast.walk(ast.parse(snippet)):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith(("megatron.b", "balancing")):
                found = importlib.util.find_spec(node.module)
                assert found is not None and found.origin is not None, node.module
                tree = ast.parse(Path(found.origin).read_text()).body
                names = {getattr(each, "name", None) for each in tree}
                names |= {alias.name for each in tree if isinstance(each, ast.ImportFrom) for alias in each.names}
                assigned = [target for each in tree if isinstance(each, ast.Assign) for target in each.targets]
                names |= {getattr(target, "id", None) for target in assigned}
                assert {alias.name for alias in node.names} <= names, node.module


@pytest.mark.parametrize("page", GUIDES, ids=_name)
def test_python_examples_run(page, capsys):
    examples = re.findall(r"^```python\n(.*?)^```", page.read_text(), re.M | re.S)
    for example in examples:
        exec(compile(example, _name(page), "exec"), {})
        assert capsys.readouterr().out, "an example shows something"


def test_the_readme_keeps_to_its_length_and_shows_every_balancer():
    text = (REPOSITORY / "README.md").read_text()
    assert len(text.splitlines()) <= 140
    (example,) = re.findall(r"^(CUDA_\S+ torchrun .*?)^$", text.partition("## With `pretrain_gpt.py`")[2], re.M | re.S)
    assert {"--balance", "all"} <= set(example.split()) and len(example.splitlines()) <= 3
    for balancer in ("experts", "sequences", "layers"):
        assert f"[`--balance-{balancer}`](docs/{balancer}.md)" in text


def test_the_readme_names_versions_and_the_length_of_the_entry_point_as_they_are():
    text, setup = ((REPOSITORY / name).read_text() for name in ("README.md", "setup.py"))
    (oldest, newest) = re.search(r"PyTorch (2\.\d+) to (2\.\d+)", text).groups()
    assert f'"torch>={oldest}.0a0,<2.{int(newest.partition(".")[2]) + 1}"' in setup
    pythons = re.findall(r"3\.\d+", re.search(r"Python (.+?),", text)[1])
    assert f'python_requires=">={pythons[0]}"' in setup
    assert pythons == re.findall(r"Language :: Python :: (3\.\d+)", setup)
    assert f"- megatron-core {' and '.join(MEGATRON_VERSIONS)}. " in text
    assert f"megatron-core {MEGATRON_VERSIONS[0].rpartition('.')[0]}, PyTorch" in text
    entry = REPOSITORY / "pretrain_gpt.py"
    assert f"the entry point, {len(entry.read_text().splitlines())} lines" in text


def test_the_readme_counts_recipes_as_their_page_does():
    readme = " ".join((REPOSITORY / "README.md").read_text().split())
    counts = ", ".join(rf"{name} (\d+ of \d+)" for name in ("experts", "layers", "sequences", "the report"))
    told = re.search(counts, readme)
    (row,) = re.findall(r"^\| \*\*all\*\* \|.*$", (REPOSITORY / "docs/recipes.md").read_text(), re.M)
    assert told is not None and list(told.groups()) == re.findall(r"\d+ of \d+", row)


def test_every_patch_is_documented():
    rows = re.findall(r"^\| `([^`]+)` \|", (REPOSITORY / "docs/internals/overlay.md").read_text(), re.M)
    code = (REPOSITORY / "megatron/balanced/trainer/patches.py").read_text()
    targets = re.findall(r'target="([^"]+)"', code)
    assert targets
    for target in targets:
        assert any(target.endswith(row.removeprefix("...")) for row in rows), target
    assert len(rows) == len(targets)


def test_linters_of_pre_commit_and_of_the_suite_are_one_version():
    pinned = re.search(r"ruff==([\d.]+)", (REPOSITORY / "setup.py").read_text())
    hook = re.search(r"ruff-pre-commit\s+rev: v([\d.]+)", (REPOSITORY / ".pre-commit-config.yaml").read_text())
    assert pinned and hook and pinned[1] == hook[1]


def test_the_papers_are_cited():
    cited = (REPOSITORY / "CITATION.cff").read_text()
    papers = set(re.findall(r"arxiv\.org/abs/([\d.]+\d)", (REPOSITORY / "README.md").read_text()))
    assert len(papers) == 3 and all(f"https://arxiv.org/abs/{paper}" in cited for paper in papers)

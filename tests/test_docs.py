"""What people read is true: links lead somewhere, commands name modules and flags that exist, pages are short."""

import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
PAGES = [
    *REPOSITORY.glob("*.md"),
    *REPOSITORY.glob("docs/**/*.md"),
    *REPOSITORY.glob("benchmarks/**/*.md"),
    *REPOSITORY.glob("scripts/**/*.md"),
    *REPOSITORY.glob(".github/**/*.md"),
]
LOG = REPOSITORY / "benchmarks" / "log"


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


def test_the_log_of_measurements_is_listed_newest_first():
    listed = re.findall(r"^- \[(.+)\]\((.+)\)$", (LOG / "README.md").read_text(), re.M)
    entries = sorted(path.name for path in LOG.glob("*.md") if path.name != "README.md")
    assert sorted(name for _, name in listed) == entries
    days = [name[:10] for _, name in listed]
    assert days == sorted(days, reverse=True)
    for title, name in listed:
        assert re.match(r"\d{4}-\d\d-\d\d-[a-z0-9-]+\.md$", name)
        assert (LOG / name).read_text().startswith(f"# {title}\n"), name


def test_the_page_of_newest_figures_is_one_page():
    assert len((REPOSITORY / "benchmarks/README.md").read_text().splitlines()) <= 150

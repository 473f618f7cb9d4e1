"""What came of the parts: noted line by line while they run, shown as a table, written where people look.

A file of JSON lines holds what is known: that a part began, each figure as soon as it is measured, and its verdict. A
part that was killed keeps its figures, and the next start knows which parts have run.
"""

import json
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.gpu.parts import PARTS, Part

__all__ = ["Verdict", "note", "read_report", "read_results", "table", "title", "write_section"]

BEGIN, END = "<!-- gpu_check.sh writes what follows -->", "<!-- gpu_check.sh wrote what precedes -->"


@dataclass(frozen=True)
class Verdict:
    """Of one part. word: "passed", "failed", "stopped" (it was killed) or "not run". seconds: that it took. said: its
    figures, and why it did not pass."""

    part: Part
    word: str
    seconds: float
    said: str


def note(results: Path, part: str, **what: Any) -> None:
    """Add a line to the results."""
    with results.open("a") as file:
        file.write(json.dumps({"part": part, **what}) + "\n")


def read_results(results: Path) -> list[Verdict]:
    """The verdict of each part, in order, by its last start."""
    found: dict[str, dict[str, Any]] = {}
    figures: dict[str, list[str]] = {}
    for line in results.read_text().splitlines() if results.exists() else ():
        try:
            said = json.loads(line)
        except ValueError:  # cut off
            continue
        if "figure" in said:
            figures.setdefault(said["part"], []).append(said["figure"])
            continue
        if "word" not in said:
            figures[said["part"]] = []
        found[said["part"]] = {"word": "stopped", "seconds": 0.0, "said": "it was stopped before it ended"} | said
    verdicts = []
    for part in PARTS:
        said = found.get(part.name, {"word": "not run", "seconds": 0.0, "said": ""})
        text = "; ".join(filter(None, [said["said"], *figures.get(part.name, ())]))
        verdicts.append(Verdict(part, said["word"], said["seconds"], _one_line(text)))
    return verdicts


def read_report(report: Path) -> tuple[str, str]:
    """Word and reason by a report in JUnit's format of a part's only test."""
    try:
        cases = ElementTree.parse(report).getroot().findall(".//testcase")
    except (OSError, ElementTree.ParseError):
        cases = []
    if len(cases) != 1:
        return "failed", f"pytest reported {len(cases)} tests instead of one"
    for kind, word in (("failure", "failed"), ("error", "failed"), ("skipped", "not run")):
        if (found := cases[0].find(kind)) is not None:
            return word, _one_line(found.get("message", ""))
    return "passed", ""


def _one_line(text: str) -> str:
    return re.sub(r"\s+", " ", text).strip().replace("|", "/")[:600]


def table(verdicts: list[Verdict]) -> str:
    """In Markdown."""
    rows = [f"| {v.part.name} | {v.part.shows} | {v.word} | {v.seconds:.0f} | {v.said} |" for v in verdicts]
    return "\n".join(["| part | shows | verdict | seconds | figures, or why not |", "|---|---|---|---|---|", *rows])


def title(verdicts: list[Verdict], device: str) -> str:
    """The verdict of all parts together. It says that the acceptance passed only where every part did."""
    names = {word: [v.part.name for v in verdicts if v.word == word] for word in ("failed", "stopped", "not run")}
    passed = sum(v.word == "passed" for v in verdicts)
    if passed == len(verdicts):
        return f"Acceptance passed on {device}: all {passed} parts"
    word = "failed" if names["failed"] or names["stopped"] else "is incomplete"
    missing = [f"{which}: {', '.join(them)}" for which, them in names.items() if them]
    return f"Acceptance {word} on {device}: {passed} of {len(verdicts)} parts passed; {'; '.join(missing)}"


def write_section(page: Path, text: str) -> None:
    """Put `text` between the two marks of a page. Raises ValueError, one line, where the page cannot be written."""
    from balancing.files import write_text  # needs NumPy, and the list of parts shows without it

    before, _, rest = page.read_text().partition(BEGIN)
    after = rest.partition(END)[2]
    assert rest and after, f"{page} lacks its marks"
    write_text(page, f"{before}{BEGIN}\n\n{text.strip()}\n\n{END}{after}")

"""What came of the parts: read from pytest's report, shown as a table, kept as an entry of the log of measurements."""

import re
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from pathlib import Path

from tests.gpu.parts import Part

__all__ = ["Verdict", "read_report", "table", "write_entry"]


@dataclass(frozen=True)
class Verdict:
    """Of one part. word: "passed", "failed" or "not run". seconds: that it took. said: its figure, or why not."""

    part: Part
    word: str
    seconds: float
    said: str


def read_report(part: Part, report: Path, seconds: float) -> Verdict:
    """The verdict by a report in JUnit's format of the part's only test."""
    try:
        cases = ElementTree.parse(report).getroot().findall(".//testcase")
    except (OSError, ElementTree.ParseError):
        cases = []
    if len(cases) != 1:
        return Verdict(part, "failed", seconds, f"pytest reported {len(cases)} tests instead of one")
    (case,) = cases
    for kind, word in (("failure", "failed"), ("error", "failed"), ("skipped", "not run")):
        if (found := case.find(kind)) is not None:
            return Verdict(part, word, seconds, _one_line(found.get("message", "")))
    figures = [item.get("value", "") for item in case.iter("property") if item.get("name") == "figure"]
    return Verdict(part, "passed", seconds, _one_line("; ".join(figures)))


def _one_line(text: str) -> str:
    return re.sub(r"\s+", " ", text).strip().replace("|", "/")[:400]


def table(verdicts: list[Verdict]) -> str:
    """In Markdown."""
    rows = [f"| {v.part.name} | {v.word} | {v.seconds:.0f} | {v.said} |" for v in verdicts]
    return "\n".join(["| part | verdict | seconds | figure, or why not |", "|---|---|---|---|", *rows])


def title(verdicts: list[Verdict], device: str) -> str:
    """The verdict of all parts together."""
    count = {word: [v.part.name for v in verdicts if v.word == word] for word in ("passed", "failed", "not run")}
    ran = len(count["passed"]) + len(count["failed"])
    said = f"Acceptance on {device}: {len(count['passed'])} of the {ran} parts that ran pass"
    said += f", failed: {', '.join(count['failed'])}" if count["failed"] else ""
    return said + (f"; not run: {', '.join(count['not run'])}" if count["not run"] else "")


def write_entry(verdicts: list[Verdict], log: Path, date: str, device: str, about: list[str]) -> Path:
    """Write DATE-gpu.md, or DATE-gpu-2.md and so on, and list it in the log's README.md. Returns its path.

    log: the folder. date: YYYY-MM-DD. device: in words. about: lines on commit, machine, command.
    """
    from balancing.files import write_text  # needs NumPy, and the list of parts shows without it

    number, path = 1, log / f"{date}-gpu.md"
    while path.exists():
        number += 1
        path = log / f"{date}-gpu-{number}.md"
    said = title(verdicts, device)
    lines = [f"# {said}", "", *about, "", table(verdicts), ""]
    write_text(path, "\n".join(lines))
    index = log / "README.md"
    text, line = index.read_text(), f"- [{said}]({path.name})\n"
    heading = f"## {date}\n\n"
    if heading in text:
        text = text.replace(heading, heading + line, 1)
    else:
        days = re.search(r"^## \d{4}-", text, re.M)
        at = days.start() if days else len(text)
        text = f"{text[:at]}{heading}{line}\n{text[at:]}"
    write_text(index, text)
    return path

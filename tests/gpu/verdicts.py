"""What came of the parts: noted line by line while they run, shown as a table, written where people look.

A file of JSON lines holds what is known: that a part began, what it does, each figure as soon as it is measured, and
its verdict. A part that was killed keeps its figures, and the next start knows which parts have run."""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.gpu.parts import PARTS, Part

__all__ = ["Verdict", "details", "note", "read_results", "table", "title", "write_section"]

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


def _lines(results: Path) -> list[dict[str, Any]]:
    """What is known of each part since its last start."""
    lines: dict[str, list[dict[str, Any]]] = {}
    for line in results.read_text().splitlines() if results.exists() else ():
        try:
            said = json.loads(line)
        except ValueError:  # cut off
            continue
        if "began" in said:
            lines[said["part"]] = []
        lines.setdefault(said["part"], []).append(said)
    return [said for of_part in lines.values() for said in of_part]


def read_results(results: Path) -> list[Verdict]:
    """The verdict of each part, in order, by its last start."""
    known: dict[str, list[dict[str, Any]]] = {part.name: [] for part in PARTS}
    for said in _lines(results):
        known.get(said["part"], []).append(said)
    verdicts = []
    for part in PARTS:
        found: dict[str, Any] = {"word": "not run", "seconds": 0.0, "said": ""}
        for said in known[part.name]:
            if "began" in said:
                found = {"word": "stopped", "seconds": 0.0, "said": "it was stopped before it ended"}
            elif "at" in said:
                found["said"] = f"it was stopped in {said['at']}"
            elif "word" in said:
                found = {"seconds": 0.0} | said
        figures = [said["figure"] for said in known[part.name] if "figure" in said]
        text = one_line("; ".join(filter(None, [found["said"], *figures])), 2000)
        verdicts.append(Verdict(part, found["word"], found["seconds"], text))
    return verdicts


def details(results: Path) -> list[str]:
    """What parts said for the page behind the table, a line each, by part."""
    return [f"- {said['part']}: {one_line(said['detail'], 2000)}" for said in _lines(results) if "detail" in said]


def one_line(text: str, most: int) -> str:
    """For a table's cell."""
    return re.sub(r"\s+", " ", text).strip().replace("|", "/")[:most]


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

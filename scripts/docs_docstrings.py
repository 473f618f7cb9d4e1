"""An extension of griffe, the reader of docstrings for the site: parameters become a list, indented blocks stay.

Docstrings of this project name parameters as `name: what it is`, one per line. Markdown would join these lines into one
paragraph.
"""

import re
from typing import Any

import griffe

_PARAMETER = re.compile(r"^([\w*]+(?:, [\w*]+)*)((?: \[[^\]]*\])?: .*)$")


class Parameters(griffe.Extension):
    """Makes each parameter an item of a list, and each indented block one of code."""

    def on_object(self, *, obj: Any, **unused: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = _mended(obj.docstring.value)


def _mended(text: str) -> str:
    found: list[str] = []
    inside = False
    for line in text.splitlines():
        parameter = _PARAMETER.match(line)
        starts = not found or not found[-1] or inside
        if parameter and starts:
            found.append(f"- `{parameter[1]}`{parameter[2]}")
            inside = True
            continue
        if line.startswith("    ") and not inside and found and found[-1] and not found[-1].startswith(("    ", "- ")):
            found.append("")  # a block after its title
        inside = inside and bool(line)
        found.append(line)
    return "\n".join(found)

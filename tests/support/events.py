"""What a run with `--balance-report` has written down."""

import json
from pathlib import Path
from typing import Any

__all__ = ["events_in"]


def events_in(folder: Path, **having: Any) -> list[dict[str, Any]]:
    """The lines of the report's event log, in order. having: values that a line must have, by name."""
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    return [event for event in events if all(event.get(name) == value for name, value in having.items())]

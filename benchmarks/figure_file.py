"""Figures of benchmarks, written as every other file: whole or not at all (`balancing.files`)."""

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from balancing.files import output

__all__ = ["save_figure"]


def save_figure(figure: Figure, path: str | Path, **options: Any) -> None:
    """Write `figure` in the format that the name of the file ends with, PNG without one. Figures of this repository are
    PNG: as text, curves are thousands of lines that nobody reads. options: of `savefig`.

    Raises ValueError, in one line, if the file cannot be written.
    """
    options.setdefault("dpi", 110)
    with output(path) as file:
        figure.savefig(file, format=Path(path).suffix.removeprefix(".") or "png", **options)

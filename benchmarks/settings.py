"""Settings that have no flag, for a command line: a file of `--balance-config` for each set of them.

    f"--balance-experts {settings('experts', min_gain=0)}"

The file's name says what is in it and stays the same from process to process, so that names of test cases do.
"""

import os
import tempfile
from pathlib import Path
from typing import Any

import yaml

_FOLDER = Path(tempfile.gettempdir()) / f"balance-config-{os.getuid()}"


def settings(section: str, **fields: Any) -> str:
    """`--balance-config FILE` with these fields of a section. Several such may stand in one command line."""
    named = ",".join(f"{name}={value}" for name, value in fields.items()).replace(" ", "")
    path = _FOLDER / f"{section}.{named}.yaml"
    if not path.exists():
        _FOLDER.mkdir(exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}")
        partial.write_text(yaml.safe_dump({section: fields}))
        partial.rename(path)  # others read it whole or not at all
    return f"--balance-config {path}"

"""Settings for a command line. Settings that have no flag are written to a file of `--balance-config`.

    f"--balance-experts {settings('experts', min_gain=0)} {scheme_flags(prune_sparsity=0.8, prune_end=9)}"

The file's name consists of the settings. It is the same in all processes, and so are names of test cases with it.
"""

import os
import tempfile
from pathlib import Path
from typing import Any

import yaml

from examples.dynamic_models.config import shown

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


def scheme_flags(**fields: Any) -> str:
    """Flags of examples/dynamic_models/pretrain.py that set these fields of its config."""
    return " ".join(shown(name, value) for name, value in fields.items())

"""python -m tests.gpu.rank FOLDER RANK PARENT: one rank of a job of `tests.gpu.ranks`, a process of its own."""

import faulthandler
import os
import pickle
import sys
from pathlib import Path

from tests.support.pool_server import Outcome, _call, die_with_parent, result_file


def main(folder: Path, rank: int, parent: int) -> int:
    die_with_parent(parent)
    faulthandler.enable()
    if os.environ.get("GPU_CHECK_STAGED"):
        from tests.gpu.host_group import use_host_groups

        use_host_groups()
    outcome = _call(pickle.loads((folder / "job").read_bytes()))
    try:
        data = pickle.dumps(outcome)
    except Exception as error:
        outcome = Outcome(report=f"the result cannot be pickled: {error}")
        data = pickle.dumps(outcome)
    result = result_file(folder, rank)
    result.with_suffix(".partial").write_bytes(data)
    result.with_suffix(".partial").rename(result)
    return 0 if outcome.report is None else 1


if __name__ == "__main__":
    code = main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
    sys.stdout.flush()
    sys.stderr.flush()
    # Ranks end at different times: destroying NCCL's communicators would wait for the others.
    os._exit(code)

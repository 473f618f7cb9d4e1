"""python -m tests.gpu.references: train the small models of `parity.py` on the CPU and keep their losses.

`references.json` holds them for the models of both devices, so that nothing on a machine with GPUs waits for a CPU.
Weights are drawn by their names, data by a seed. `--check` compares with what is kept and writes nothing."""

import argparse
import json
import sys
import tempfile
from pathlib import Path

__all__ = ["FILE", "record", "recorded"]

FILE = Path(__file__).with_suffix(".json")
ROUNDING = 1e-5  # between the sums of two CPUs or releases of torch, relative


def recorded(name: str, device: str) -> list[float]:
    """The losses that a CPU has in this run, of the model of a device."""
    return json.loads(FILE.read_text())[device][name]


def record(names: list[str], shape: str) -> dict[str, list[float]]:
    """Losses of unbalanced runs on the CPU. shape: the device whose model it is."""
    from tests.gpu.parity import UNBALANCED, unbalanced
    from tests.gpu.training import losses, run
    from tests.gpu.trial import Machine, Notes, Trial
    from tests.support.pool import Pool

    pool, found = Pool(), {}
    try:
        with tempfile.TemporaryDirectory() as folder:
            trial = Trial(pool, Machine(), Notes(f"reference of {shape}"), Path(folder))
            for name in names:
                ranks, _ = UNBALANCED[name]
                argv = unbalanced(name, trial, shape=shape)
                found[name] = losses(run(trial, ranks, argv, what=name))
    finally:
        pool.stop()
    return found


def main() -> int:
    from tests.gpu.parity import UNBALANCED
    from tests.gpu.training import apart

    parser = argparse.ArgumentParser(prog="python -m tests.gpu.references", description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare with what is kept, and write nothing")
    options = parser.parse_args()
    found = {shape: record([*UNBALANCED], shape) for shape in ("cpu", "cuda")}
    if not options.check:
        runs = [
            f' "{shape}": {{\n' + ",\n".join(f"  {json.dumps(name)}: {of}" for name, of in by.items()) + "\n }"
            for shape, by in found.items()
        ]
        FILE.write_text("{\n" + ",\n".join(runs) + "\n}\n")  # a line a run
        return 0
    worst = max(max(apart(of, recorded(name, shape))) for shape, by in found.items() for name, of in by.items())
    print(f"losses within {worst:.1e} of those that are kept")
    return int(worst > ROUNDING)


if __name__ == "__main__":
    sys.exit(main())

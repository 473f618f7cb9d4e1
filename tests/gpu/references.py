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
ROUTED = 1e-2  # of later steps where these decide which expert a token goes to


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
    worst = dict.fromkeys((ROUNDING, ROUTED), 0.0)
    for shape, name, of in ((shape, name, of) for shape, by in found.items() for name, of in by.items()):
        for step, far in enumerate(apart(of, recorded(name, shape))):
            most = ROUTED if step and shape == "cuda" and "experts" in name else ROUNDING
            worst[most] = max(worst[most], far)
    told = " and ".join(f"{far:.1e} (at most {most:.0e})" for most, far in worst.items())
    print(f"losses within {told} of those that are kept, later steps with experts the last")
    return int(any(far > most for most, far in worst.items()))


if __name__ == "__main__":
    sys.exit(main())

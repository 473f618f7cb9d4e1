"""The examples of scripts/slurm/examples: what each hands to sbatch is accepted by a dry run at its full size."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.support.command import plan_lines_of
from tests.support.patience import PATIENCE
from tests.support.program import script

REPOSITORY = Path(__file__).resolve().parents[2]
EXAMPLES = REPOSITORY / "scripts/slurm/examples"
# In place of Slurm's.
SBATCH = '#!/usr/bin/env bash\nprintf \'%s\\0\' TRAIN_SCRIPT "${TRAIN_SCRIPT:-}" "$@"\n'
# Of each example: its ranks, and the beginning of every line on what its balancers plan.
PLANS = {
    "deepseek_v3": (
        1024,
        "plan   --balance-experts: 16 expert-parallel groups of 64 ranks on 8 nodes",
        "slots  --expert-replica-slots 2: beside 4 home expert(s), in each of the 0 to 4 MoE layer(s) of a rank",
        "memory experts.replica_mode auto: 1.969 GiB resident",
        "plan   --balance-layers: all 1024 ranks make one plan; layers move along 64 pipelines of 16 ranks",
        "gain   On 1,024 GPUs balancing saves",
        "memory about ",
        "       a forecast for --cluster h100-8x400g",
    ),
    "dense_7b_long_context": (
        128,
        "plan   --balance-sequences: 16 context-parallel groups of 8 ranks on 1 node",
        "plan   --balance-layers-once: all 128 ranks make one plan; layers move along 64 pipelines of 2 ranks",
        "gain   On 128 GPUs balancing saves",
        "memory about ",
        "       a forecast for --cluster h100-8x400g",
    ),
    "freezing_13b": (
        128,
        "plan   --balance-layers: all 128 ranks make one plan; layers move along 16 pipelines of 8 ranks",
        "gain   On 128 GPUs balancing saves",
        "gain   with 9 layers frozen 7 of 8 stages keep 99% of the balanced throughput, and 2 nodes are released",
        "memory about ",
        "       a forecast for --cluster h100-8x400g, 24 of 40 layers frozen; ",
    ),
    "mixtral_8x7b": (
        64,
        "plan   --balance-experts: 8 expert-parallel groups of 8 ranks on 1 node",
        "slots  --expert-replica-slots 2: beside 1 home expert(s), in each of the 8 MoE layer(s) of a rank",
        "memory experts.replica_mode auto: 15.750 GiB resident, or 3.938 GiB shared",
        "plan   --balance-sequences: 32 context-parallel groups of 2 ranks on 1 node",
        "plan   --balance-layers: all 64 ranks make one plan; layers move along 16 pipelines of 4 ranks",
        "gain   On 64 GPUs balancing saves",
        "memory about ",
        "       a forecast for --cluster h100-8x400g",
    ),
}


def _example(name: str, *flags: str, **environment: str) -> subprocess.CompletedProcess:
    inherited = {name: value for name, value in os.environ.items() if name not in ("DATA", "TOKENIZER", "RUN")}
    command = [EXAMPLES / f"{name}.sh", *flags]
    return subprocess.run(command, env=inherited | environment, capture_output=True, text=True, timeout=PATIENCE)


def _submitted(folder: Path, name: str, *flags: str) -> tuple[dict[str, str], list[str]]:
    """Options that an example gives sbatch, and the arguments of its training."""
    sbatch = folder / "sbatch"
    sbatch.write_text(SBATCH)
    sbatch.chmod(0o755)
    places = {"DATA": "/shared/corpus", "TOKENIZER": str(folder), "RUN": str(folder / "run")}
    done = _example(name, *flags, PATH=f"{folder}:{os.environ['PATH']}", **places)
    assert done.returncode == 0, done.stderr
    given = done.stdout.split("\0")[:-1]
    script = given.index(str(REPOSITORY / "scripts/slurm/pretrain_gpt.sbatch"))
    return dict(zip(given[:script:2], given[1:script:2], strict=True)), given[script + 1 :]


def test_every_example_is_planned_at_its_full_size(pool, tmp_path):
    assert {path.stem for path in EXAMPLES.glob("*.sh")} == {"submit", *PLANS}
    for name, (ranks, *lines) in PLANS.items():
        options, flags = _submitted(tmp_path, name, "--log-interval", "1")
        assert options["--job-name"] == name and flags[-2:] == ["--log-interval", "1"]
        assert int(options["--nodes"]) * int(options["--ntasks-per-node"]) == ranks
        assert options["--gpus-per-node"] == options["--ntasks-per-node"]
        program = script(flags).relative_to(REPOSITORY)
        assert options["TRAIN_SCRIPT"] == ("" if str(program) == "pretrain_gpt.py" else str(REPOSITORY / program))
        at = flags.index("--data-path")
        assert flags[at : at + 4] == ["--data-path", "/shared/corpus", "--split", "99,1,0"]
        flags[at : at + 4] = ["--mock-data"]
        ((code, said, told),) = pool.run(1, plan_lines_of, flags, {"WORLD_SIZE": str(ranks)})
        assert code == 0, (name, said)
        told = "\n".join(told).splitlines()
        assert len(told) == len(lines), told
        for line, begin in zip(told, lines, strict=True):
            assert line.startswith(begin), name


@pytest.mark.parametrize(
    "environment, words",
    [({}, ("DATA", "TOKENIZER", "--balance-dry-run")), ({"DATA": "/data", "TOKENIZER": "/t"}, ("sbatch is not",))],
)
def test_what_is_missing_is_one_line(tmp_path, environment, words):
    for tool in ("basename", "bash", "dirname", "env"):
        (tmp_path / tool).symlink_to(Path("/usr/bin") / tool)
    done = _example("mixtral_8x7b", **environment, PATH=str(tmp_path))
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.count("\n") == 1 and done.stderr.startswith("mixtral_8x7b.sh: ")
    for word in words:
        assert word in done.stderr

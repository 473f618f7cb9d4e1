"""scripts/slurm against a real Slurm: ranks find each other, a dead rank ends the job, a requeued job goes on.

The cluster is tests/support/slurm_cluster.py: four nodes on this machine. Without Slurm its tests are skipped with the
reason.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.patience import PATIENCE
from tests.support.settings import settings
from tests.support.slurm_cluster import SEARCH_PATH, SlurmCluster, wait_until, why_not

REPOSITORY = Path(__file__).resolve().parents[2]
SCRIPTS = REPOSITORY / "scripts" / "slurm"

ALL_REDUCE = """
import datetime, os, sys
import torch, torch.distributed as dist
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=600))
total = torch.tensor(2.0 ** dist.get_rank())
dist.all_reduce(total)
names = "LOCAL_RANK LOCAL_WORLD_SIZE NODE_RANK MASTER_ADDR MASTER_PORT SLURMD_NODENAME GLOO_SOCKET_IFNAME".split()
print("RESULT", dist.get_rank(), dist.get_world_size(), int(total), *(os.environ[name] for name in names), flush=True)
print("ARGUMENTS", *sys.argv[1:], flush=True)
dist.destroy_process_group()
"""

# Like Megatron with --exit-signal-handler, the ranks that live on take no notice of SIGTERM.
ONE_DIES = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.environ["RANK"] == "3":
    print("the reason is in the log", flush=True)
    sys.exit(17)
time.sleep(3600)
"""

# Counts its runs in the directory of --save, as a training that writes a checkpoint now and then: the last rank alone,
# before it says that it runs.
COUNTS_RUNS = """
import os, pathlib, signal, sys, time
save = pathlib.Path(sys.argv[sys.argv.index("--save") + 1])
restarts = int(os.environ.get("SLURM_RESTART_COUNT", 0))
is_last = int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1
if restarts == 0 and is_last and "--never-saves" not in sys.argv:
    save.mkdir()
    (save / "latest_checkpointed_iteration.txt").write_text("40")
print("RUN", restarts, *sys.argv[1:], flush=True)
if restarts == 0:
    time.sleep(3600)
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[SlurmCluster]:
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    with SlurmCluster() as running:
        yield running


class Checkout:
    """A checkout with the real scripts and a stand-in for the training, whose .venv runs this Python."""

    def __init__(self, root: Path):
        self.root = root
        self.submit_directory = root.parent / "elsewhere"
        self.submit_directory.mkdir()
        shutil.copytree(SCRIPTS, root / "scripts" / "slurm")
        python = root / ".venv" / "bin" / "python"
        python.parent.mkdir(parents=True)
        python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
        python.chmod(0o755)

    def submit(
        self,
        cluster: SlurmCluster,
        program: str,
        *options: str,
        arguments: tuple[str, ...] = ("--x",),
        **variables: str,
    ) -> int:
        """Submit the job from another directory, as users do; `options` are sbatch's, `variables` the environment's."""
        (self.root / "pretrain_gpt.py").write_text(program)
        script = str(self.root / "scripts" / "slurm" / "pretrain_gpt.sbatch")
        return cluster.submit(*options, script, *arguments, directory=self.submit_directory, environment=variables)

    def log(self, job: int) -> str:
        return (self.submit_directory / f"slurm-{job}.out").read_text()

    def rank_log(self, job: int, rank: int) -> str:
        path = self.submit_directory / "logs" / str(job) / f"rank-{rank}.log"
        return path.read_text() if path.exists() else ""


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path / "checkout")


def tagged(text: str, tag: str) -> list[list[str]]:
    return [line.split()[1:] for line in text.splitlines() if line.startswith(f"{tag} ")]


def test_ranks_find_each_other_over_two_nodes(cluster: SlurmCluster, checkout: Checkout) -> None:
    job = checkout.submit(
        cluster, ALL_REDUCE, "--nodes=2", "--ntasks-per-node=2", arguments=("--num-layers", "4", "--name", "two words")
    )
    state = cluster.wait(job)
    assert state["JobState"] == "COMPLETED", checkout.log(job)
    ports = set()
    for rank in range(4):
        log = checkout.rank_log(job, rank)
        ((number, world, total, local, local_world, node_rank, address, port, node, interface),) = tagged(log, "RESULT")
        assert (int(number), int(world), int(total)) == (rank, 4, 15)
        assert (int(local), int(local_world), int(node_rank)) == (rank % 2, 2, rank // 2)
        assert node == f"n{rank // 2 + 1}"
        assert address == "127.0.0.1" and interface == "lo"  # the nodes' names resolve nowhere, Slurm's NodeAddr does
        ports.add(int(port))
        assert tagged(log, "ARGUMENTS") == [["--num-layers", "4", "--name", "two", "words"]]
        shown = f"rank {rank} | host n{rank // 2 + 1} | local rank {rank % 2} | GPU none | CPUs "
        assert shown in log and shown in checkout.log(job)
        assert "| nearest NIC " in log and "| GLOO_SOCKET_IFNAME lo | NCCL_SOCKET_IFNAME " in log
    assert len(ports) == 1 and 10000 <= ports.pop() < 30000


def test_dead_rank_ends_the_job_and_is_named(cluster: SlurmCluster, checkout: Checkout) -> None:
    job = checkout.submit(cluster, ONE_DIES, "--nodes=2", "--ntasks-per-node=2")
    state = cluster.wait(job)
    assert (state["JobState"], state["ExitCode"]) == ("FAILED", "17:0")
    assert "rank 3 failed first: on n2, exit code 17" in checkout.log(job)
    assert "rank 3 | the reason is in the log" in checkout.log(job)


def test_requeued_job_loads_what_it_saved(cluster: SlurmCluster, checkout: Checkout) -> None:
    save = checkout.submit_directory / "save"
    arguments = ("--load", "other-weights", "--save", str(save))
    job = checkout.submit(cluster, COUNTS_RUNS, "--nodes=2", arguments=arguments)
    wait_until(lambda: "RUN 0" in checkout.rank_log(job, 1), lambda: checkout.log(job))
    cluster.command("scontrol", "requeue", str(job))
    state = cluster.wait(job)
    assert (state["JobState"], state["Restarts"]) == ("COMPLETED", "1"), checkout.log(job)
    given = ["--load", "other-weights", "--save", str(save), "--exit-signal-handler"]
    assert tagged(checkout.rank_log(job, 1), "RUN") == [["0", *given], ["1", *given, "--load", str(save)]]
    assert "run 1: 2 ranks, 1 a node, on n[1-2]" in checkout.log(job)
    assert f"continues from {save}, iteration 40" in checkout.log(job)


def test_job_that_saves_nothing_is_not_requeued_forever(cluster: SlurmCluster, checkout: Checkout) -> None:
    arguments = ("--save", str(checkout.submit_directory / "save"), "--never-saves")
    job = checkout.submit(cluster, COUNTS_RUNS, "--nodes=1", arguments=arguments)
    wait_until(lambda: "RUN 0" in checkout.rank_log(job, 0), lambda: checkout.log(job))
    cluster.command("scancel", "--batch", "--signal=USR1", str(job))
    state = cluster.wait(job)
    assert (state["JobState"], state["Restarts"]) == ("FAILED", "0")
    assert "no checkpoint was written in this run" in checkout.log(job)


def test_one_rank_per_gpu_when_no_tasks_are_asked_for(cluster: SlurmCluster, checkout: Checkout) -> None:
    program = "from os import environ as e; print('GPU', e['CUDA_VISIBLE_DEVICES'], e['LOCAL_RANK'], e['WORLD_SIZE'])"
    every = checkout.submit(cluster, program, "--nodes=2", "--gpus-per-node=2")
    assert cluster.wait(every)["JobState"] == "COMPLETED", checkout.log(every)
    assert [tagged(checkout.rank_log(every, rank), "GPU") for rank in range(4)] == [
        [["0,1", str(rank % 2), "4"]] for rank in range(4)
    ]
    # Slurm shows each rank its own GPU alone: Megatron's device number is then 0.
    own = checkout.submit(cluster, program, "--nodes=1", "--ntasks-per-node=2", "--gpus-per-task=1")
    assert cluster.wait(own)["JobState"] == "COMPLETED", checkout.log(own)
    assert [tagged(checkout.rank_log(own, rank), "GPU") for rank in range(2)] == [[["0", "0", "2"]], [["1", "0", "2"]]]


# Stand-ins that show what they are asked for and do the rest: no image is needed to see the command that is made.
APPTAINER = f"""#!/bin/bash
echo "APPTAINER $*"
exec {sys.executable} "${{@: -2}}"
"""
PYXIS = f"""#!/bin/bash
srun={shutil.which("srun", path=SEARCH_PATH)}
if [[ $1 == --help ]]; then
    "$srun" --help
    echo "  --container-image=[USER@][REGISTRY#]IMAGE[:TAG]|PATH"
    exit
fi
for argument; do
    if [[ $argument == --container-* ]]; then echo "PYXIS $argument"; else others+=("$argument"); fi
done
exec "$srun" "${{others[@]}}"
"""


@pytest.mark.parametrize(
    ("name", "program", "shown"),
    [
        (
            "apptainer",
            APPTAINER,
            r"APPTAINER exec --nv --bind \S+,/d:/d --pwd \S+ i.sif python3 -u \S+/pretrain_gpt.py --x",
        ),
        (
            "srun",
            PYXIS,
            r"PYXIS --container-image=i.sif\nPYXIS --container-mounts=\S+,/d:/d\nPYXIS --container-workdir=/\S+",
        ),
    ],
    ids=["apptainer", "pyxis"],
)
def test_container_command(cluster: SlurmCluster, checkout: Checkout, name: str, program: str, shown: str) -> None:
    tools = checkout.root / "tools"
    tools.mkdir()
    (tools / name).write_text(program)
    (tools / name).chmod(0o755)
    path = f"{tools}:{SEARCH_PATH}"
    job = checkout.submit(cluster, "print('TRAINED')", CONTAINER_IMAGE="i.sif", CONTAINER_MOUNTS="/d:/d", PATH=path)
    assert cluster.wait(job)["JobState"] == "COMPLETED", checkout.log(job)
    assert re.search(shown, checkout.log(job) + checkout.rank_log(job, 0)), checkout.log(job)
    assert "TRAINED" in checkout.rank_log(job, 0)


MISUSES = {
    "no training arguments": ((), (), {}),
    "the first argument 'pretrain_gpt.py' is not an option": ((), ("pretrain_gpt.py", "--x"), {}),
    "--nodes=2 is an option of sbatch: put it before the script's name": ((), ("--x", "--nodes=2"), {}),
    "no Python at '/nowhere/python'": ((), ("--x",), {"PYTHON": "/nowhere/python"}),
    "is older than 3.12 or has no torch": ((), ("--x",), {"PYTHON": "/bin/true-not-python"}),
    "no training script at /nowhere.py": ((), ("--x",), {"TRAIN_SCRIPT": "/nowhere.py"}),
    "neither pyxis (srun --container-image) nor apptainer": ((), ("--x",), {"CONTAINER_IMAGE": "image.sif"}),
    "4 ranks a node but 2 GPUs": (("--ntasks-per-node=4", "--gpus-per-node=2"), ("--x",), {}),
    "3 tasks do not divide over 2 nodes": (("--nodes=2", "--ntasks=3"), ("--x",), {}),
    "4 tasks do not fill 2 nodes with 4 each": (("--nodes=2", "--ntasks=4", "--ntasks-per-node=4"), ("--x",), {}),
    "MASTER_PORT=99999 is not a port": ((), ("--x",), {"MASTER_PORT": "99999"}),
    "the master 'no.such.host.invalid' cannot be resolved": ((), ("--x",), {"MASTER_ADDR": "no.such.host.invalid"}),
    "--finetune would throw away progress": ((), ("--x", "--finetune", "--save", "s"), {}),
    "cannot write the log directory /proc/logs": ((), ("--x",), {"LOG_DIR": "/proc/logs"}),
}


def test_each_misuse_is_one_clear_line(cluster: SlurmCluster, checkout: Checkout) -> None:
    not_python = checkout.root / "false"
    not_python.write_text("#!/bin/sh\nexit 1\n")
    not_python.chmod(0o755)
    jobs = {}
    for message, (options, arguments, variables) in MISUSES.items():
        variables = {key: str(not_python) if "not-python" in value else value for key, value in variables.items()}
        jobs[message] = checkout.submit(cluster, "print('started')", *options, arguments=arguments, **variables)
    for message, job in jobs.items():
        state = cluster.wait(job)
        assert (state["JobState"], state["ExitCode"]) == ("FAILED", "2:0"), (message, checkout.log(job))
        *notes, last = checkout.log(job).splitlines()
        assert all(note.startswith("[") for note in notes)
        assert last.startswith("pretrain_gpt.sbatch: ") and message in last
        assert not checkout.rank_log(job, 0)


@pytest.mark.exhaustive
def test_training_continues_after_the_time_limit(cluster: SlurmCluster, tmp_path: Path) -> None:
    """Megatron over two nodes, stopped by the warning of the time limit, goes on in the second run where it was."""
    options = f"""--device cpu --mock-data --tokenizer-type NullTokenizer --vocab-size 127 --num-layers 2
        --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 --micro-batch-size 1
        --global-batch-size 4 --train-iters 10000 --eval-interval 100000 --eval-iters 0 --lr 1e-3
        --pipeline-model-parallel-size 2 --transformer-impl local --no-persist-layer-norm --log-interval 1
        --save {tmp_path}/save --save-interval 100000"""
    job = cluster.submit(
        "--nodes=2",
        "--ntasks-per-node=1",
        str(SCRIPTS / "pretrain_gpt.sbatch"),
        *options.split(),
        directory=tmp_path,
        environment={"PYTHON": sys.executable},
    )
    last_rank = tmp_path / "logs" / str(job) / "rank-1.log"

    def log() -> str:
        return last_rank.read_text() if last_rank.exists() else ""

    def job_log() -> str:
        path = tmp_path / f"slurm-{job}.out"
        return path.read_text() if path.exists() else ""

    wait_until(lambda: "iteration        1/" in log() or "failed" in job_log(), job_log)
    cluster.command("scancel", "--batch", "--signal=USR1", str(job))

    def iterations(run: int) -> list[int]:
        text = log().split("=== job")[1:]
        return [int(i) for i in re.findall(r"iteration +(\d+)/", text[run])] if len(text) > run else []

    wait_until(lambda: len(iterations(1)) >= 3 or "failed" in job_log(), job_log)
    cluster.command("scancel", str(job))
    assert cluster.wait(job)["Restarts"] == "1", job_log()
    stopped = int(re.findall(r"stopped at iteration (\d+) \(srun ended with 0\); requeueing", job_log())[0])
    assert iterations(0) == list(range(1, stopped + 1))
    assert iterations(1)[:3] == [stopped + 1, stopped + 2, stopped + 3]


@pytest.mark.exhaustive
def test_stages_that_are_not_needed_go_back_while_training_goes_on(cluster: SlurmCluster, tmp_path: Path) -> None:
    """Four stages on four nodes, of which two are enough: their ranks end well, and the job has two nodes left."""
    options = f"""--device cpu --mock-data --tokenizer-type NullTokenizer --vocab-size 127 --num-layers 4
        --hidden-size 32 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 --micro-batch-size 1
        --global-batch-size 4 --train-iters 100000 --eval-interval 1000000 --eval-iters 0 --lr 1e-3 --num-workers 0
        --pipeline-model-parallel-size 4 --log-interval 1 --balance-layers --layer-balance-interval 5
        {settings("layers", min_gain=0.99, repack_min_stages=2)} --repack-throughput-floor 0.01
        --balance-report {tmp_path}/report"""
    job = cluster.submit(
        "--nodes=4",
        "--ntasks-per-node=1",
        str(SCRIPTS / "pretrain_gpt.sbatch"),
        *options.split(),
        directory=tmp_path,
        environment={"PYTHON": sys.executable},
    )

    def log(rank: int) -> str:
        path = tmp_path / "logs" / str(job) / f"rank-{rank}.log"
        return path.read_text() if path.exists() else ""

    def trained(rank: int) -> list[int]:
        return [int(i) for i in re.findall(r"iteration +(\d+)/", log(rank))]

    def job_log() -> str:
        path = tmp_path / f"slurm-{job}.out"
        return (path.read_text() if path.exists() else "") + log(0)[-3000:] + log(3)[-3000:]

    def nodes() -> int:
        return int(cluster.command("squeue", "-h", f"--job={job}", "--format=%D"))

    wait_until(lambda: "were returned to SLURM" in log(0) or "failed" in job_log(), job_log)
    assert nodes() == 2, job_log()
    wait_until(lambda: cluster.idle_nodes() == ["n3", "n4"], lambda: str(cluster.idle_nodes()))
    wait_until(lambda: trained(1) or "failed" in job_log(), job_log)
    seen = trained(1)[-1]
    wait_until(lambda: trained(1)[-1] > seen + 5 or "failed" in job_log(), job_log)
    cluster.command("scancel", str(job))
    every = trained(3) + trained(1)
    assert every == list(range(1, every[-1] + 1)), "an iteration was lost or done twice"
    assert trained(0) == trained(2) == []
    events = (tmp_path / "report" / "events.jsonl").read_text().splitlines()
    (release,) = [event for event in map(json.loads, events) if event["action"] == "release"]
    assert (release["stages_left"], release["ranks_freed"]) == (2, 2)


def test_outside_of_a_job_it_says_how_to_submit() -> None:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("SLURM")}
    done = subprocess.run(
        ["bash", str(SCRIPTS / "pretrain_gpt.sbatch"), "--x"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 2 and not done.stdout
    assert done.stderr.startswith("pretrain_gpt.sbatch: not inside a Slurm job; submit it: sbatch ")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "capability", "needed"),
    [
        ("--num-layers 2", "9.0", False),
        ("--tensor-model-parallel-size 2", "9.0", True),
        ("--context-parallel-size=2", "9.0", True),
        ("--context-parallel-size 2", "", True),  # no GPU on this host
        ("--tensor-model-parallel-size 1 --context-parallel-size 1", "9.0", False),
        ("--tensor-model-parallel-size 2", "10.0", False),
        ("--tensor-model-parallel-size 2 --use-megatron-fsdp", "9.0", False),
        ("--use-checkpoint-args", "8.0", True),
    ],
)
def test_one_queue_to_a_gpu_only_where_megatron_demands_it(
    tmp_path: Path, arguments: str, capability: str, needed: bool
) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\necho {capability}\n" if capability else "#!/bin/sh\nexit 9\n")
    tool.chmod(0o755)
    done = subprocess.run(
        ["bash", "-uc", f'source {SCRIPTS}/arguments.sh; needs_one_queue "$@"', "bash", *arguments.split()],
        env=os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"},
        timeout=PATIENCE,
    )
    assert done.returncode == (0 if needed else 1)

"""A real SLURM on one machine, so that the job scripts are tested against Slurm itself and not against a stand-in.

`SlurmCluster` starts munged, slurmctld and one slurmd per node (nodes `n1`, `n2`, ... that all live on this host, each
with its own port) in a temporary directory and in a PID namespace of their own. The namespace makes the end certain:
when its first process dies, by `stop()`, by a crash or with the test process, the kernel kills every daemon, step and
payload in it.

Run as a script it checks whether a cluster can be started here, or opens a shell in one:

    python -m tests.support.slurm_cluster --check
    python -m tests.support.slurm_cluster
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.emulated.ports import reserved_ports
from tests.support.patience import PATIENCE

PROGRAMS = (
    "munged",
    "slurmctld",
    "slurmd",
    "sbatch",
    "srun",
    "scontrol",
    "squeue",
    "scancel",
    "sinfo",
    "unshare",
    "setpriv",
)
SEARCH_PATH = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"

# One machine plays every node, so nodes declare the processors they are meant to have (config_overrides), jobs may
# share the real ones, and nothing of the machine (cgroups, accounting, mail) is touched. cred_expire is how long Slurm
# holds a requeued job back, by default two minutes.
SLURM_CONF = """\
ClusterName=one-machine
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={directory}/munge.socket,cred_expire=5
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool.%n
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/slurmd.%n.pid
SlurmctldLogFile={directory}/slurmctld.log
SlurmdLogFile={directory}/slurmd.%n.log
SlurmdParameters=config_overrides
SchedulerType=sched/builtin
SchedulerParameters=batch_sched_delay=0,sched_interval=1
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MailProg=/bin/true
PropagateResourceLimits=NONE
ReturnToService=2
KillWait=5
InactiveLimit=0
MinJobAge=300
SlurmctldTimeout=120
SlurmdTimeout=120
GresTypes=gpu
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=60 DefaultTime=30 State=UP OverSubscribe=NO
"""


class SlurmUnavailable(RuntimeError):
    """No SLURM can run here. The message says what is missing and what to do about it, in one line."""


def why_not() -> str | None:
    """The reason why a cluster cannot be started on this machine, or None."""
    missing = [name for name in PROGRAMS if shutil.which(name, path=SEARCH_PATH) is None]
    if missing:
        return f"SLURM is not installed (no {', '.join(missing)}): run scripts/install_slurm.sh"
    if os.geteuid() != 0:
        return "starting SLURM daemons in their own PID namespace needs root"
    probe = subprocess.run(
        ["unshare", "--pid", "--fork", "--mount-proc", "true"], capture_output=True, timeout=PATIENCE
    )
    if probe.returncode != 0:
        return f"no PID namespace can be made here: {probe.stderr.decode(errors='replace').strip()}"
    return None


class SlurmCluster:
    """A running SLURM; use it as a context manager.

    nodes: number of nodes, named n1, n2, ...; cpus and gpus: how many of each a node declares (the GPUs are Slurm's
    bookkeeping alone: jobs get CUDA_VISIBLE_DEVICES, no device is needed). Raises SlurmUnavailable with the reason.
    """

    def __init__(self, nodes: int = 4, cpus: int = 8, gpus: int = 2):
        self.nodes, self.cpus, self.gpus = nodes, cpus, gpus
        self._open = contextlib.ExitStack()

    def __enter__(self) -> SlurmCluster:
        reason = why_not()
        if reason is not None:
            raise SlurmUnavailable(reason)
        self.directory = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))
        try:
            self._start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def environment(self) -> dict[str, str]:
        """Environment for Slurm's commands: this cluster's configuration, and no trace of a job that we may run in."""
        outer = {key: value for key, value in os.environ.items() if not key.startswith(("SLURM_", "SBATCH_", "SRUN_"))}
        return {**outer, "PATH": SEARCH_PATH, "SLURM_CONF": str(self.directory / "slurm.conf")}

    def command(self, *arguments: str) -> str:
        """Run one of Slurm's commands and return what it prints. RuntimeError with its message when it fails."""
        done = subprocess.run(arguments, env=self.environment, capture_output=True, text=True, timeout=PATIENCE)
        if done.returncode != 0:
            raise RuntimeError(f"{shlex.join(arguments)} ended with {done.returncode}: {done.stderr.strip()}")
        return done.stdout

    def submit(self, *arguments: str, directory: Path, environment: dict[str, str] | None = None) -> int:
        """`sbatch arguments` from `directory` with extra environment variables; returns the job's number."""
        done = subprocess.run(
            ["sbatch", "--parsable", *arguments],
            cwd=directory,
            env={**self.environment, **(environment or {})},
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        )
        if done.returncode != 0:
            raise RuntimeError(f"sbatch ended with {done.returncode}: {done.stderr.strip()}")
        return int(done.stdout.split(";")[0])

    def job(self, number: int) -> dict[str, str]:
        """What `scontrol show job` says of a job, as a dictionary (JobState, ExitCode, Restarts, NumNodes, ...)."""
        words = self.command("scontrol", "show", "job", "--oneliner", str(number)).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait(self, number: int) -> dict[str, str]:
        """Wait until a job has ended and every process of it is gone. TimeoutError with its state otherwise."""
        running = ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "REQUEUED", "SUSPENDED", "RESIZING")
        wait_until(
            lambda: self.job(number)["JobState"] not in running,
            lambda: f"job {number} is {self.job(number)['JobState']} ({self.job(number)['Reason']})",
        )
        return self.job(number)

    def idle_nodes(self) -> list[str]:
        """Names of the nodes on which nothing runs."""
        return self.command("sinfo", "--noheader", "--Node", "--states=idle", "--format=%N").split()

    def stop(self) -> None:
        """End every process of the cluster and remove its files."""
        process = getattr(self, "process", None)
        if process is not None:
            process.kill()
            process.wait(timeout=PATIENCE)
        self._open.close()
        shutil.rmtree(self.directory, ignore_errors=True)

    def _start(self) -> None:
        directory = self.directory
        directory.chmod(0o755)  # munged refuses a socket directory that its clients cannot enter
        key = directory / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(secrets.token_bytes(128))
        (directory / "state").mkdir()
        controller_port, *ports = self._open.enter_context(reserved_ports(self.nodes + 1))
        nodes = "\n".join(
            f"NodeName=n{i} NodeHostname={socket.gethostname()} NodeAddr=127.0.0.1 Port={port} "
            f"CPUs={self.cpus} RealMemory=1000 Gres=gpu:{self.gpus} State=UNKNOWN"
            for i, port in enumerate(ports, start=1)
        )
        configuration = SLURM_CONF.format(
            host=socket.gethostname().split(".")[0], controller_port=controller_port, directory=directory, nodes=nodes
        )
        (directory / "slurm.conf").write_text(configuration)
        # Slurm only counts these files; it opens none of them without cgroups.
        (directory / "gres.conf").write_text(f"Name=gpu File=/dev/tty[1-{self.gpus}]\n")
        munged = (
            f"munged --foreground --force --key-file={key} --socket={directory}/munge.socket "
            f"--pid-file={directory}/munged.pid --log-file={directory}/munged.log --seed-file={directory}/munge.seed"
        )
        connected = f"until [ -S {directory}/munge.socket ]; do sleep 0.05; done;"  # Slurm's daemons do not wait for it
        daemons = [munged, "slurmctld -D", *(f"slurmd -D -N n{i}" for i in range(1, self.nodes + 1))]
        script = " ".join(f"{daemon} & {connected if daemon is munged else ''}" for daemon in daemons) + " wait"
        # setpriv: die with the test process. unshare: the whole namespace dies with unshare.
        namespace = ["setpriv", "--pdeathsig", "KILL", "unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
        with (directory / "daemons.log").open("wb") as log:
            self.process = subprocess.Popen(
                [*namespace, "bash", "-c", script],
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        wait_until(self._ready, self._why_not_ready, SlurmUnavailable)

    def _ready(self) -> bool:
        if self.process.poll() is not None:
            raise SlurmUnavailable(self._why_not_ready())
        try:
            return len(self.idle_nodes()) == self.nodes
        except (RuntimeError, subprocess.TimeoutExpired):
            return False

    def _why_not_ready(self) -> str:
        logs = sorted(self.directory.glob("*.log"))
        lines = [line for log in logs for line in log.read_text(errors="replace").splitlines()]
        errors = [line for line in lines if "error" in line.lower() or "fatal" in line.lower()]
        reason = " | ".join(errors[-3:]) or "its logs name no error"
        return f"SLURM did not start within {PATIENCE:.0f} s: {reason}"


def wait_until(
    condition: Callable[[], bool],
    explain: Callable[[], str],
    error: type[Exception] = TimeoutError,
    interval: float = 0.2,
) -> None:
    """Poll `condition` until it holds; when patience ends, raise `error` with what `explain` says."""
    end = time.monotonic() + PATIENCE
    while not condition():
        if time.monotonic() > end:
            raise error(explain())
        time.sleep(interval)


def main() -> int:
    """Check whether SLURM can run here, or run a shell (or the given command) in a cluster."""
    arguments = sys.argv[1:]
    if arguments == ["--check"]:
        print(why_not() or "SLURM can be started here")
        return int(why_not() is not None)
    try:
        with SlurmCluster() as cluster:
            return subprocess.run(arguments or ["bash"], env=cluster.environment).returncode
    except SlurmUnavailable as reason:
        print(f"slurm_cluster: {reason}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())

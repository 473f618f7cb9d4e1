"""The emulated cluster: ranks as torchrun starts them, limits that hold, and nothing left behind however it ends."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks.emulated import EmulatedCluster, RankFailed, RunTimeout, parse_rate
from benchmarks.emulated import network as network_module
from benchmarks.emulated.network import Network, remove_stale
from tests.support.command import run_python
from tests.support.patience import PATIENCE, heed_interrupts

ROOT = Path(__file__).resolve().parents[2]
NAMESPACES = Path("/run/netns")


def _why_no_namespaces():
    if reason := Network.impossible():
        return reason
    network = Network(1, 1, 1e6)
    try:
        network.create()
    except OSError as error:
        return str(error)
    network.remove()
    return None


reason = _why_no_namespaces()
needs_namespaces = pytest.mark.skipif(reason is not None, reason=f"no network namespaces here: {reason}")


def write(path, text):
    path.write_text(text)
    return str(path)


def launch(*arguments, **environment):
    """The command line, as a finished process."""
    return run_python("-m", "benchmarks.emulated", *map(str, arguments), **environment)


def wait_until(condition, what):
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, f"not in {PATIENCE:g} s: {what}"
        time.sleep(0.05)


def alive(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def namespaces_of(pid, prefix="emulated"):
    return [path.name for path in NAMESPACES.glob(f"{prefix}-{pid}-*")]


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        ("25MB/s", 25e6),
        ("200Mbit/s", 25e6),
        ("1GB/s", 1e9),
        ("1.5 Gbps", 187.5e6),
        ("64MiB/s", 64 * 2**20),
        ("800kb/s", 1e5),
    ],
)
def test_rates_as_people_write_them(text, rate):
    assert parse_rate(text) == pytest.approx(rate)


@pytest.mark.parametrize(
    "text", ["", "25", "25MB", "fast", "25mb/s", "-1MB/s", "0MB/s", "99kB/s", "25MB/s/s", "1e3MB/s"]
)
def test_other_rates_are_refused_by_name(text):
    with pytest.raises(ValueError, match=f"'{text}'"):
        parse_rate(text)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--nic", "25 parsecs"], "25 parsecs"),
        (["--nodes", "0"], "nodes must be 1 to 250, not 0"),
        (["--ranks-per-node", "-2"], "not -2"),
        (["--nics-per-node", "999"], "not 999"),
        ([], "missing.py does not exist"),
    ],
)
def test_bad_input_is_one_line(arguments, named):
    done = launch(*arguments, "--", "missing.py")
    assert done.returncode == 2 and named in done.stderr
    lines = [line for line in done.stderr.splitlines() if "not shaped" not in line]
    assert len(lines) == 1 and lines[0].startswith("emulated: ")


SHOW = """
import json, os, sys
names = [name for name in os.environ if name.startswith(("EMULATED_", "MASTER_", "LOCAL_", "GROUP_", "OMP_", "GLOO_"))]
print(json.dumps({name: os.environ[name] for name in [*names, "RANK", "WORLD_SIZE"]} | {"argv": sys.argv[1:]}))
print("to stderr", file=sys.stderr)
"""


def check_environment(output, shaped):
    shown = [json.loads(next(line for line in lines if line.startswith("{"))) for lines in output]
    assert all("to stderr" in lines for lines in output)
    for rank, of_rank in enumerate(shown):
        assert (of_rank["RANK"], of_rank["LOCAL_RANK"], of_rank["GROUP_RANK"]) == (
            str(rank),
            str(rank % 4),
            str(rank // 4),
        )
        assert (
            of_rank["WORLD_SIZE"] == "8" and of_rank["LOCAL_WORLD_SIZE"] == "4" and of_rank["GROUP_WORLD_SIZE"] == "2"
        )
        assert of_rank["OMP_NUM_THREADS"] == "1" and int(of_rank["MASTER_PORT"]) > 0
        assert of_rank["EMULATED_NODES"] == "2" and of_rank["EMULATED_RANKS_PER_NODE"] == "4"
        assert of_rank["EMULATED_NICS_PER_NODE"] == "2" and of_rank["EMULATED_NIC"] == str(rank % 4 // 2)
        assert of_rank["GLOO_SOCKET_IFNAME"] == (f"nic{rank % 4 // 2}" if shaped else "lo")
        assert of_rank.get("EMULATED_NIC_BYTES_PER_SECOND") == ("25000000" if shaped else None)
        assert of_rank["argv"] == ["--flag", "two words"]
    assert len({(of_rank["MASTER_ADDR"], of_rank["MASTER_PORT"]) for of_rank in shown}) == 1


def test_ranks_start_as_torchrun_starts_them(tmp_path):
    script = write(tmp_path / "show.py", SHOW)
    with EmulatedCluster(2, 4, nics_per_node=2) as cluster:
        assert not cluster.shaped
        check_environment(cluster.run(script, ["--flag", "two words"], timeout=PATIENCE).output, shaped=False)


@needs_namespaces
def test_ranks_on_a_limited_network_are_told_of_it(tmp_path):
    script = write(tmp_path / "show.py", SHOW)
    with EmulatedCluster(2, 4, nics_per_node=2, nic="25MB/s") as cluster:
        assert cluster.shaped and len(namespaces_of(os.getpid())) == 5  # four NICs and the fabric
        with EmulatedCluster(1, 1, nic="1GB/s") as another:
            assert another.shaped and len(namespaces_of(os.getpid())) == 7
        assert len(namespaces_of(os.getpid())) == 5
        check_environment(cluster.run(script, ["--flag", "two words"], timeout=PATIENCE).output, shaped=True)
    assert namespaces_of(os.getpid()) == []


def test_without_ip_and_tc_one_line_says_that_the_network_is_not_shaped(tmp_path):
    """The same holds without root; a machine without the tools is the case that root can test too."""
    script = write(tmp_path / "hello.py", "import os; print('hello from', os.environ['RANK'])")
    done = launch("--ranks-per-node", 2, "--nic", "25MB/s", "--", script, PATH=str(tmp_path))
    assert done.returncode == 0
    assert len(done.stderr.splitlines()) == 1 and "the network is not shaped" in done.stderr
    assert sorted(done.stdout.splitlines()) == ["[rank 0] hello from 0", "[rank 1] hello from 1"]


def test_output_goes_to_a_file_a_rank_on_request(tmp_path):
    script = write(tmp_path / "hello.py", "import os; print('hello from', os.environ['RANK'], end='')")
    done = launch("--ranks-per-node", 2, "--log-dir", tmp_path / "logs", "--", script)
    assert done.returncode == 0 and done.stdout == ""
    assert [(tmp_path / "logs" / f"rank_{rank}.log").read_text() for rank in (0, 1)] == [
        "hello from 0\n",
        "hello from 1\n",
    ]


# Each rank notes its process id, and that of a child of its own, before it goes on.
NOTE = """
import os, pathlib, subprocess, sys, time
folder, rank = pathlib.Path(sys.argv[1]), os.environ["RANK"]
child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(3600)"])
(folder / f"{rank}.tmp").write_text(f"{os.getpid()} {child.pid}")
(folder / f"{rank}.tmp").rename(folder / f"{rank}.pid")
while len(list(folder.glob("*.pid"))) < int(os.environ["WORLD_SIZE"]):
    time.sleep(0.02)
"""


def noted(folder):
    return [tuple(map(int, path.read_text().split())) for path in sorted(folder.glob("*.pid"))]


@pytest.mark.parametrize(
    ("end", "code", "how"),
    [("sys.exit(7)", 7, "exited with code 7"), ("os.kill(os.getpid(), 9)", 137, "was killed by SIGKILL")],
)
def test_the_first_rank_that_fails_ends_the_run_and_is_named(tmp_path, end, code, how):
    script = write(tmp_path / "fail.py", NOTE + f"if rank == '2':\n    print('oh no')\n    {end}\ntime.sleep(3600)\n")
    done = launch("--nodes", 2, "--ranks-per-node", 2, "--", script, tmp_path)
    assert done.returncode == code
    assert f"rank 2 of 4 {how}" in done.stderr.splitlines()[-1] and "[rank 2] oh no" in done.stdout
    assert len(noted(tmp_path)) == 4
    wait_until(lambda: not any(alive(pid) for pids in noted(tmp_path) for pid in pids), "all processes have ended")


def test_failures_and_timeouts_reach_python(tmp_path):
    failing = write(tmp_path / "fail.py", "import os, sys; print('last words'); sys.exit(int(os.environ['RANK']) * 3)")
    waiting = write(tmp_path / "wait.py", "import os, time; time.sleep(3600 * int(os.environ['RANK']))")
    with EmulatedCluster(1, 2) as cluster:
        with pytest.raises(RankFailed) as failure:
            cluster.run(failing, timeout=PATIENCE)
        assert (failure.value.rank, failure.value.exit_code, failure.value.tail) == (1, 3, ("last words",))
        for seconds in (1, 10, 100):  # until the machine finds the time to end rank 0
            with pytest.raises(RunTimeout, match=f"1 had not ended after {seconds} s") as timeout:
                cluster.run(waiting, timeout=seconds)
            if len(timeout.value.running) == 1:
                break
        assert timeout.value.running == (1,) and "ranks 1 had" in str(timeout.value)
        with pytest.raises(ValueError, match=r"no\.py does not exist"):
            cluster.run(tmp_path / "no.py", timeout=PATIENCE)
    assert launch("--timeout", 0.2, "--", write(tmp_path / "s.py", "import time; time.sleep(3600)")).returncode == 124


@pytest.mark.parametrize("shaped", [False, pytest.param(True, marks=needs_namespaces)], ids=["loopback", "shaped"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda number: number.name)
def test_nothing_stays_when_the_launcher_is_ended_midway(tmp_path, number, shaped):
    script = write(tmp_path / "sleep.py", NOTE + "time.sleep(3600)\n")
    nic = ["--nic", "25MB/s"] if shaped else []
    command = [sys.executable, "-m", "benchmarks.emulated", "--nodes", "2", "--ranks-per-node", "2", *nic]
    with subprocess.Popen(
        [*command, "--", script, str(tmp_path)], cwd=ROOT, stderr=subprocess.PIPE, text=True, preexec_fn=heed_interrupts
    ) as launcher:
        try:
            wait_until(lambda: len(noted(tmp_path)) == 4, "all ranks run")
            assert all(alive(pid) for pids in noted(tmp_path) for pid in pids)
            assert len(namespaces_of(launcher.pid)) == (3 if shaped else 0)
            launcher.send_signal(number)
            launcher.wait(timeout=PATIENCE)
        finally:
            launcher.kill()
        assert "Traceback" not in launcher.stderr.read()
    pids = noted(tmp_path)
    try:
        if number == signal.SIGKILL:
            assert launcher.returncode == -9
            wait_until(lambda: not any(alive(rank) for rank, _ in pids), "the ranks have died with the launcher")
            if shaped:  # nobody was left to remove the namespaces and the ranks' own children: the next start does, of
                # whatever launcher on this machine
                hello = write(tmp_path / "hello.py", "print('hello')")
                assert launch("--nic", "25MB/s", "--", hello).returncode == 0
                wait_until(lambda: not any(alive(child) for _, child in pids), "their children have been stopped")
        else:
            assert launcher.returncode == {signal.SIGINT: 130, signal.SIGTERM: 143}[number]
            wait_until(lambda: not any(alive(pid) for both in pids for pid in both), "all processes have ended")
        # Another launcher on this machine may be removing the same.
        wait_until(lambda: namespaces_of(launcher.pid) == [], "the namespaces are removed")
    finally:
        for _, child in pids:
            if alive(child):
                os.kill(child, signal.SIGKILL)


@needs_namespaces
def test_only_what_dead_launchers_left_is_stale(monkeypatch):
    """Under names of its own, since every launcher on this machine removes what is stale when it starts."""
    monkeypatch.setattr(network_module, "_PREFIX", "emulatedtest")
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    left = f"emulatedtest-{dead.pid}-12345-node0-nic0"
    subprocess.run(["ip", "netns", "add", left], check=True, timeout=PATIENCE)
    network = Network(1, 1, 1e6)
    try:
        network.create()
        assert remove_stale() == [left]
        assert len(namespaces_of(os.getpid(), "emulatedtest")) == 2 and not (NAMESPACES / left).exists()
    finally:
        network.remove()
    assert namespaces_of(os.getpid(), "emulatedtest") == []


# One rank sends a megabyte to another over a socket; each tells how long that took and what went through which card.
TRANSFER = """
import json, os, socket, sys, time
source, target, size = map(int, sys.argv[1:4])
rank, port = int(os.environ["RANK"]), int(os.environ["MASTER_PORT"])
host = f"node{target // 2}-nic{target % 2}"  # two ranks and two cards a node

def cards():
    lines = [line.replace(":", " ").split() for line in open("/proc/self/net/dev").read().splitlines()[2:]]
    return {fields[0]: int(fields[9]) for fields in lines}

before, begin = cards(), time.monotonic()
if rank == target:
    with socket.create_server((host, port)) as server:
        connection, _ = server.accept()
        received = 0
        while data := connection.recv(1 << 16):
            received += len(data)
        assert received == size, received
        connection.sendall(b"x")
elif rank == source:
    while True:
        try:
            connection = socket.create_connection((host, port))
            break
        except ConnectionRefusedError:
            time.sleep(0.01)
    begin = time.monotonic()
    connection.sendall(bytes(size))
    connection.shutdown(socket.SHUT_WR)
    assert connection.recv(1) == b"x"
seconds = time.monotonic() - begin
print(json.dumps({"seconds": seconds, "sent": {name: sent - before[name] for name, sent in cards().items()}}))
"""


@needs_namespaces
def test_traffic_between_nodes_is_limited_and_leaves_by_the_ranks_own_card(tmp_path):
    script, size = write(tmp_path / "transfer.py", TRANSFER), 2_000_000
    with EmulatedCluster(2, 2, nics_per_node=2, nic="10MB/s") as cluster:
        for source, target in ((0, 2), (1, 2), (0, 3)):  # rank 1 has card 1, and connects to a card 0
            run = cluster.run(script, [str(source), str(target), str(size)], timeout=PATIENCE)
            result = json.loads(run.output[source][-1])
            assert result["seconds"] > 0.8 * size / 10e6  # noise only makes it slower
            assert result["sent"][f"nic{source % 2}"] > size and result["sent"]["node"] < size / 10
        run = cluster.run(script, ["0", "1", str(size)], timeout=PATIENCE)
        sent = json.loads(run.output[0][-1])["sent"]
        assert sent["node"] > size and sent["nic0"] < size / 10


GLOO = """
import os, sys, torch, torch.distributed as dist
from datetime import timedelta
dist.init_process_group("gloo", timeout=timedelta(seconds=600))
sent = lambda: sum(int(line.split()[9]) for line in open("/proc/self/net/dev") if "nic" in line)
before = sent()
data = torch.full((250_000,), float(dist.get_rank()))
dist.all_reduce(data)
assert data.unique().tolist() == [1.0]
print("sent", sent() - before)
dist.barrier()
dist.destroy_process_group()
"""


@needs_namespaces
def test_gloo_goes_over_the_cards(tmp_path):
    with EmulatedCluster(2, 1, nic="100MB/s") as cluster:
        run = cluster.run(write(tmp_path / "gloo.py", GLOO), timeout=PATIENCE)
    assert all(int(lines[-1].split()[1]) > 900_000 for lines in run.output)


def test_a_paced_stage_is_the_identity_and_takes_its_seconds():
    import torch

    from balancing.clock import device_time
    from benchmarks.emulated.paced import PacedStage

    stage = PacedStage(None, [0.02, 0.0], [0.03, 0.0], chunk=1)
    given = torch.randn(4, 1, 16, requires_grad=True)
    begin = device_time()
    for _ in range(2):
        stage.set_input_tensor([given])
        output = stage()
        assert torch.equal(output, given) and output._base is None
        output.backward(torch.full_like(given, 2.0))
    assert device_time() - begin >= 0.05
    assert torch.equal(given.grad, torch.full_like(given, 4.0))
    assert [entry[:3] for entry in stage.log] == [
        (kind, 1, batch) for batch in (0, 1) for kind in ("forward", "backward")
    ]
    assert stage.log[0][4] - stage.log[0][3] >= 0.02 and stage.log[1][4] - stage.log[1][3] >= 0.03


def test_receives_are_posted_before_sends(monkeypatch):
    import torch.distributed as dist

    from benchmarks.emulated import paced

    monkeypatch.setattr(paced, "_batch_isend_irecv", lambda p2p_op_list: [each.tag for each in p2p_op_list])
    batch = [SimpleNamespace(op=op, tag=tag) for tag, op in enumerate((dist.isend, dist.irecv, dist.isend, dist.irecv))]
    assert paced._receives_first(batch) == [1, 3, 0, 2]


@pytest.mark.exhaustive
def test_megatrons_schedule_runs_paced_stages():
    pipeline = {"forward": [[0.02], [0.04]], "backward": [[0.04], [0.08]], "micro_batches": 3, "message_bytes": 5000}
    with EmulatedCluster(1, 2) as cluster:
        module = ["ignore", "-m", "benchmarks.emulated.paced", json.dumps([pipeline | {"repeats": 2}])]
        run = cluster.run("-W", module, timeout=PATIENCE)
    (seconds,) = json.loads(run.output[0][-1])
    assert len(seconds) == 2 and min(seconds) >= 0.02 + 3 * 0.12 + 0.04  # noise only makes it slower

"""`Cluster`: presets, files, the launch environment and measurements."""

import itertools
import json
import math
import os
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from balancing.cluster import PRESETS, Cluster, measured_links
from balancing.launch import Launch, detect_launch, detect_nics, host_memory
from balancing_tools import cluster as measure
from balancing_tools.cluster import main
from tests.support.command import run_python

SMALL = Cluster(
    nodes=2,
    ranks_per_node=8,
    nics_per_node=4,
    intra_node_bandwidth=160e9,
    nic_bandwidth=25e9,
    flops=250e12,
    memory=80e9,
)


def test_ranks_fill_nodes_in_order_and_share_nics_with_their_neighbours():
    assert SMALL.world_size == 16
    assert [SMALL.node(rank) for rank in range(16)] == [0] * 8 + [1] * 8
    assert [SMALL.nic(rank) for rank in range(16)] == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7]
    assert SMALL.same_node(0, 7) and not SMALL.same_node(7, 8)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("nics", [1, 2, 3, 4, 8])
def test_nics_are_shared_evenly(ranks, nics):
    cluster = replace(SMALL, ranks_per_node=ranks, nics_per_node=nics)
    used = Counter(nic for rank in range(cluster.world_size) for nic in cluster.nics(rank))
    per_rank = [len(cluster.nics(rank)) for rank in range(cluster.world_size)]
    assert set(used) == set(range(2 * nics)), "a NIC is idle"
    assert max(used.values()) - min(used.values()) <= 1
    assert max(per_rank) - min(per_rank) <= 1
    for rank in range(cluster.world_size):
        assert {nic // nics for nic in cluster.nics(rank)} == {cluster.node(rank)}


def test_bandwidth_depends_on_where_the_ranks_are():
    assert SMALL.bandwidth(3, 3) == math.inf
    assert SMALL.bandwidth(0, 7) == 160e9
    assert SMALL.bandwidth(0, 8) == 25e9
    assert replace(SMALL, nics_per_node=16).bandwidth(0, 8) == 50e9, "two NICs a rank"


def test_a_rank_outside_the_cluster_is_refused():
    for rank in (-1, 16):
        with pytest.raises(ValueError, match=rf"rank {rank} is not in a cluster of 16 ranks"):
            SMALL.nic(rank)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("nodes", 0),
        ("nodes", 1.5),
        ("ranks_per_node", True),
        ("nics_per_node", -1),
        ("nics_per_node", "4"),
        ("flops", 0),
        ("flops", math.inf),
        ("memory", -80e9),
        ("intra_node_bandwidth", math.nan),
        ("nic_bandwidth", None),
        ("nic_bandwidth", math.inf),
    ],
)
def test_nonsense_is_refused_by_name(field, value):
    with pytest.raises(ValueError, match=field):
        replace(SMALL, **{field: value})


def test_an_unmeasured_bandwidth_is_allowed_only_where_nothing_uses_it():
    alone = replace(SMALL, nodes=1, ranks_per_node=1, intra_node_bandwidth=math.inf, nic_bandwidth=math.inf)
    with pytest.raises(ValueError, match=r"intra_node_bandwidth is not known, and 1 node.* of 2 rank"):
        alone.relabel(1, 2)
    with pytest.raises(ValueError, match="nic_bandwidth is not known, and 2 node"):
        alone.relabel(2, 1)


def test_presets_are_one_direction_and_achievable():
    h200 = Cluster.preset("h200-8x400g", nodes=4)
    assert (h200.nodes, h200.ranks_per_node, h200.nics_per_node, h200.world_size) == (4, 8, 8, 32)
    assert 0.7 * 450e9 < h200.intra_node_bandwidth < 450e9
    assert 0.9 * 50e9 < h200.nic_bandwidth < 50e9
    assert 0.7 * 989e12 < h200.flops < 989e12
    assert h200.memory == 141e9
    a800, h800 = Cluster.preset("a800-4x200g"), Cluster.preset("h800-8x200g")
    assert a800.nics_per_node == 4 and a800.nic(0) == a800.nic(1) != a800.nic(2)
    assert h800.nic(0) != h800.nic(1)
    assert a800.intra_node_bandwidth == h800.intra_node_bandwidth < 200e9
    assert h800.flops > 3 * a800.flops


@pytest.mark.parametrize(
    ("name", "ranks", "bf16", "memory", "nic_gbit"),
    [
        # The data sheets' figures of a whole node: sparse bf16 in PFLOPS, memory in TB, Gbit/s of its network cards.
        ("h100-8x400g", 8, 15.8, 0.64, 3200),
        ("b200-8x400g", 8, 36, 1.44, 3200),
        ("b300-8x800g", 8, 36, 2.16, 6400),
        ("gb200-72x400g", 72, 360, 13.4, 28800),
        ("gb300-72x800g", 72, 360, 20.1, 57600),
    ],
)
def test_presets_add_up_to_the_data_sheet_of_a_node(name, ranks, bf16, memory, nic_gbit):
    node = Cluster.preset(name)
    assert (node.ranks_per_node, node.nics_per_node) == (ranks, ranks), "each GPU has a network card of its own"
    assert node.flops * ranks == pytest.approx(0.8 * bf16 * 1e15 / 2, rel=0.01), "dense, and what matmul reaches of it"
    assert node.memory * ranks == pytest.approx(memory * 1e12, rel=0.01)
    assert node.nic_bandwidth * node.nics_per_node == pytest.approx(0.95 * nic_gbit * 1e9 / 8)
    assert node.intra_node_bandwidth == pytest.approx(0.8 * (450e9 if name.startswith("h") else 900e9))


@pytest.mark.parametrize(
    ("world_size", "per_host", "nodes", "per_node"),
    [(72, 4, 1, 72), (64, 4, 1, 64), (16, 4, 1, 16), (8, 2, 1, 8), (144, 4, 2, 72), (128, 4, 2, 64), (80, 4, 2, 40)],
)
def test_the_hosts_of_a_rack_are_one_node(world_size, per_host, nodes, per_node):
    cluster = Cluster.from_spec("gb200-72x400g", world_size, ranks_per_node=per_host)
    assert (cluster.nodes, cluster.ranks_per_node, cluster.nics_per_node) == (nodes, per_node, per_node)
    assert cluster.bandwidth(0, per_node - 1) == Cluster.preset("gb200-72x400g").intra_node_bandwidth, "NVLink"


def test_a_group_in_a_rack_is_on_one_node(monkeypatch):
    from megatron.balanced.shared.process_groups import cluster_of

    monkeypatch.setenv("WORLD_SIZE", "128")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    rack = Cluster.from_spec("gb300-72x800g", 128, ranks_per_node=4)
    assert cluster_of(list(range(32)), rack).nodes == 1
    assert cluster_of(list(range(0, 128, 8)), rack).nodes == 2
    server = Cluster.from_spec("b200-8x400g", 128, ranks_per_node=4)
    assert cluster_of(list(range(32)), server).nodes == cluster_of(list(range(32)), None).nodes == 8


@pytest.mark.parametrize(
    "cluster", [SMALL, replace(SMALL, nodes=1, nic_bandwidth=math.inf), Cluster.preset("a800-4x200g", nodes=3)]
)
def test_json_round_trip(tmp_path, cluster):
    cluster.to_json(tmp_path / "cluster.json", about={"device": "made up"})
    assert Cluster.from_json(tmp_path / "cluster.json") == cluster
    assert "Infinity" not in (tmp_path / "cluster.json").read_text(), "not every JSON reader takes it"


def test_json_takes_numpy_numbers(tmp_path):
    numpy = pytest.importorskip("numpy")
    replace(SMALL, nodes=numpy.int64(2), flops=numpy.float32(2.5e14)).to_json(tmp_path / "cluster.json")
    assert Cluster.from_json(tmp_path / "cluster.json").nodes == 2


def _edited(tmp_path: Path, **changes: object) -> Path:
    path = tmp_path / "cluster.json"
    SMALL.to_json(path)
    content = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in content.items() if value != "gone"}))
    return path


def test_a_file_without_latencies_has_the_defaults(tmp_path):
    latencies = ("launch_seconds", "message_seconds", "host_seconds")
    for value in ("gone", None):
        assert Cluster.from_json(_edited(tmp_path, **dict.fromkeys(latencies, value))) == SMALL
    assert Cluster.from_json(_edited(tmp_path, message_seconds=0)).message_seconds == 0
    assert replace(SMALL, host_seconds=3e-6).relabel(1, 4).host_seconds == 3e-6
    for value in (-1e-6, math.inf, "soon", True):
        with pytest.raises(ValueError, match="must be a number of seconds of at least 0"):
            replace(SMALL, launch_seconds=value)


def test_bad_files_are_refused_with_the_key_named(tmp_path):
    def refused(path: Path, pattern: str) -> None:
        with pytest.raises(ValueError, match=pattern) as caught:
            Cluster.from_json(path)
        assert str(path) in str(caught.value) and "\n" not in str(caught.value)

    refused(_edited(tmp_path, nic_bandwith=25e9), r"unknown key 'nic_bandwith' \(did you mean 'nic_bandwidth'\?\)")
    refused(_edited(tmp_path, flops="gone", memory="gone"), r"missing 'flops' \(FLOP/s\), 'memory' \(bytes\)")
    refused(_edited(tmp_path, nic_bandwidth=None), "nic_bandwidth is not known, and 2 node")
    for slow in (1e-300, 5e-324, 0.5):  # seconds would be beyond what a float holds
        refused(_edited(tmp_path, nic_bandwidth=slow), f"nic_bandwidth={slow} must be a positive number of bytes/s")
    refused(_edited(tmp_path, flops=None), "flops=None must be a positive number of FLOP/s")
    refused(_edited(tmp_path, nodes="two"), "nodes='two'")
    (tmp_path / "list.json").write_text("[1, 2]")
    refused(tmp_path / "list.json", "must hold one JSON object")
    (tmp_path / "cut.json").write_text('{"nodes": 2,')
    refused(tmp_path / "cut.json", "is not JSON")
    refused(tmp_path / "absent.json", "cannot be read: No such file")


def test_one_flag_describes_the_cluster_of_a_job(tmp_path):
    assert Cluster.from_spec("a800-4x200g", 16) == Cluster.preset("a800-4x200g", nodes=2)
    SMALL.to_json(tmp_path / "cluster.json")
    assert Cluster.from_spec(str(tmp_path / "cluster.json"), 32) == replace(SMALL, nodes=4)
    half = Cluster.from_spec("a800-4x200g", 8, ranks_per_node=4)
    assert (half.nodes, half.ranks_per_node, half.nics_per_node) == (2, 4, 2), "the NICs next to the devices in use"
    with pytest.raises(ValueError, match=r"world size of 12 does not fill whole nodes of 8 ranks .*multiple of 8"):
        Cluster.from_spec("h800-8x200g", 12)
    with pytest.raises(ValueError, match=r"world size of 6 .* nodes of 4 ranks"):
        Cluster.from_spec("h800-8x200g", 6, ranks_per_node=4)
    with pytest.raises(ValueError, match=r"'b200' is neither a preset.* nor a \.json file"):
        Cluster.from_spec("b200", 8)
    with pytest.raises(ValueError, match=r"nowhere\.json cannot be read"):
        Cluster.from_spec("nowhere.json", 8)


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, Launch(1, 1, "one process")),
        ({"WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"}, Launch(16, 8, "torchrun")),
        ({"SLURM_TASKS_PER_NODE": "8(x4)"}, Launch(32, 8, "SLURM")),
        ({"SLURM_TASKS_PER_NODE": "8(x4)", "SLURM_STEP_TASKS_PER_NODE": "2(x2)"}, Launch(4, 2, "SLURM")),
        ({"SLURM_TASKS_PER_NODE": "4,4"}, Launch(8, 4, "SLURM")),
        # torchrun inside one SLURM task a node: the ranks are torchrun's.
        (
            {"SLURM_STEP_TASKS_PER_NODE": "1(x2)", "WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"},
            Launch(16, 8, "torchrun"),
        ),
        ({"SLURM_STEP_TASKS_PER_NODE": "8(x2)", "WORLD_SIZE": "16"}, Launch(16, 8, "SLURM")),
    ],
)
def test_the_launch_environment_tells_ranks_per_node(environ, expected):
    assert detect_launch(environ) == expected
    assert detect_launch(environ).nodes == expected.world_size // expected.ranks_per_node


@pytest.mark.parametrize(
    ("environ", "pattern"),
    [
        ({"WORLD_SIZE": "16"}, "LOCAL_WORLD_SIZE"),
        ({"WORLD_SIZE": "12", "LOCAL_WORLD_SIZE": "8"}, "12 ranks do not divide into nodes of 8"),
        ({"WORLD_SIZE": "eight", "LOCAL_WORLD_SIZE": "8"}, "WORLD_SIZE='eight'"),
        ({"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "0"}, "LOCAL_WORLD_SIZE='0'"),
        ({"SLURM_TASKS_PER_NODE": "8(x3),4"}, r"different numbers of tasks \(\[8, 8, 8, 4\]\)"),
        ({"SLURM_TASKS_PER_NODE": "some"}, "'some' cannot be read"),
        ({"SLURM_TASKS_PER_NODE": ""}, "cannot be read"),
    ],
)
def test_contradictory_launch_environments_are_refused(environ, pattern):
    with pytest.raises(ValueError, match=pattern):
        detect_launch(environ)


def _interface(root: Path, name: str, *, speed: str = "", state: str = "up", hardware: bool = False) -> Path:
    folder = root / "net" / name
    folder.mkdir(parents=True)
    (folder / "operstate").write_text(state + "\n")
    (folder / "speed").write_text(speed + "\n")
    if hardware:
        (folder / "device").mkdir()
    return folder


def _hca(root: Path, name: str, rate: str, state: str = "4: ACTIVE") -> None:
    port = root / "infiniband" / name / "ports" / "1"
    port.mkdir(parents=True)
    (port / "rate").write_text(f"{rate}\n")
    (port / "state").write_text(f"{state}\n")


def test_ethernet_nics_are_the_fast_ones_made_of_hardware(tmp_path):
    for name in ("lo", "docker0", "veth12ab", "br-0a", "ifb0"):
        _interface(tmp_path, name)
    _interface(tmp_path, "eno1", speed="1000", hardware=True)
    _interface(tmp_path, "ens1", speed="100000", hardware=True)
    _interface(tmp_path, "ens2", speed="100000", hardware=True)
    _interface(tmp_path, "ens3", speed="100000", state="down", hardware=True)
    nics = detect_nics({}, tmp_path)
    assert [(nic.name, nic.line_rate, nic.kind) for nic in nics] == [
        ("ens1", 12.5e9, "Ethernet"),
        ("ens2", 12.5e9, "Ethernet"),
    ]


def test_a_bond_counts_once(tmp_path):
    bond = _interface(tmp_path, "bond0", speed="50000")
    (bond / "bonding").mkdir()
    for name in ("ens1", "ens2"):
        (_interface(tmp_path, name, speed="25000", hardware=True) / "master").symlink_to(bond)
    assert [(nic.name, nic.line_rate) for nic in detect_nics({}, tmp_path)] == [("bond0", 6.25e9)]


def test_a_containers_only_interface_counts(tmp_path):
    _interface(tmp_path, "lo")
    _interface(tmp_path, "eth0", speed="-1")
    assert [(nic.name, nic.line_rate) for nic in detect_nics({}, tmp_path)] == [("eth0", None)]


def test_infiniband_goes_before_ethernet_and_obeys_nccl(tmp_path):
    _interface(tmp_path, "eth0", speed="25000", hardware=True)
    for index in range(4):
        _hca(tmp_path, f"mlx5_{index}", "400 Gb/sec (4X NDR)")
    _hca(tmp_path, "mlx5_9", "100 Gb/sec (2X HDR)")
    _hca(tmp_path, "mlx5_8", "400 Gb/sec (4X NDR)", state="1: DOWN")

    def names(wanted: str) -> list[str]:
        return [nic.name for nic in detect_nics({"NCCL_IB_HCA": wanted}, tmp_path)]

    assert {(nic.line_rate, nic.kind) for nic in detect_nics({}, tmp_path)} == {(50e9, "InfiniBand or RoCE")}
    assert names("") == ["mlx5_0", "mlx5_1", "mlx5_2", "mlx5_3"]
    assert names("mlx5_1,mlx5_3:1") == ["mlx5_1", "mlx5_3"]
    assert names("^mlx5_0") == ["mlx5_1", "mlx5_2", "mlx5_3"]
    assert names("=mlx5_9") == ["mlx5_9"]
    assert names("=mlx5") == ["eth0"], "no port is left, so traffic goes over Ethernet"


def test_the_emulated_cluster_names_its_own_nics():
    nics = detect_nics({"EMULATED_NICS_PER_NODE": "2", "EMULATED_NIC_BYTES_PER_SECOND": "2.5e7"})
    assert [(nic.name, nic.line_rate, nic.kind) for nic in nics] == [
        ("nic0", 25e6, "emulated"),
        ("nic1", 25e6, "emulated"),
    ]
    with pytest.raises(ValueError, match="EMULATED_NICS_PER_NODE='many'"):
        detect_nics({"EMULATED_NICS_PER_NODE": "many"})


def _set_clock(step: float) -> None:
    """Have everything that is measured take `step` seconds."""
    readings = itertools.count()
    measure.seconds_now = measured_links.seconds_now = lambda device: next(readings) * step


def _measure_on_rank(environment: dict[str, str], *arguments: str) -> int:
    """`python -m balancing.cluster` as one rank of a job, whose clock is set."""
    os.environ |= environment
    _set_clock(0.25)
    return measure.main(arguments)


def test_one_process_measures_itself_and_guesses_nothing(tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    for module in (measure, measured_links):
        monkeypatch.setattr(module, "seconds_now", module.seconds_now)
    _set_clock(0.01)
    path = tmp_path / "cluster.json"
    assert main(["--measure", "--device", "cpu", "--json", str(path)]) == 0
    written = json.loads(path.read_text())
    assert written["intra_node_bandwidth"] is None and written["nic_bandwidth"] is None
    assert capsys.readouterr().out.count("not measured") == 2
    cluster = Cluster.from_json(path)
    assert (cluster.nodes, cluster.ranks_per_node) == (1, 1)
    assert cluster.flops == pytest.approx(2 * 1024**3 / 0.01)
    assert cluster.memory == host_memory()
    rates = cluster.rates
    assert rates.measured and rates.kernel == "fa2" and [name for name, _ in rates.attention] == ["fa2"]
    pairs = 2048 * 2049 / 2
    assert rates.attention[0][1].forward[-1] == (2048, 2048, pytest.approx(4 * 2 * 64 * pairs / 0.01))
    assert rates.attention[0][1].backward[-1].flops == pytest.approx(2.5 * 4 * 2 * 64 * pairs / 0.01)
    ((name, products),) = rates.products
    assert name == rates.gemm == "sequential" and [rows for rows, _ in products.rows] == [32, 128, 512]
    assert all(flops == pytest.approx(2 * 512 * 256**2 / 0.01) for _, flops in products.rows)
    assert rates.copy_bandwidth == pytest.approx(2**24 / 0.01) and rates.group_seconds == pytest.approx(0.01 / 48)
    assert "operation_seconds and post_seconds: one H100" in rates.source, "these are not measured here"
    with pytest.raises(ValueError, match="nic_bandwidth is not known"):
        Cluster.from_spec(str(path), 2)


@pytest.mark.exhaustive
def test_torchrun_measures_the_bandwidth_in_a_node(tmp_path):
    path = tmp_path / "cluster.json"
    launcher = "-m torch.distributed.run --standalone --nproc-per-node 2 -m balancing.cluster".split()
    done = run_python(*launcher, "--measure", "--device", "cpu", "--json", path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("matmul per rank") == 1, "one rank speaks for all"
    cluster = Cluster.from_json(path)
    assert (cluster.nodes, cluster.ranks_per_node, cluster.nic_bandwidth) == (1, 2, math.inf)
    assert 0 < cluster.intra_node_bandwidth < math.inf
    assert cluster.memory == host_memory() // 2
    assert json.loads(path.read_text())["about"]["process group"] == "gloo"
    assert Cluster.from_spec(str(path), 2) == cluster


def test_ranks_on_two_nodes_measure_the_nic(pool, tmp_path):
    path = tmp_path / "cluster.json"
    where = {"LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    assert pool.run(2, _measure_on_rank, where, "--measure", "--device", "cpu", "--json", str(path)) == [0, 0]
    cluster = Cluster.from_json(path)
    assert (cluster.nodes, cluster.ranks_per_node, cluster.intra_node_bandwidth) == (2, 1, math.inf)
    assert cluster.nic_bandwidth == pytest.approx(2**20 / 0.25)  # the first size takes long enough
    assert Cluster.from_spec(str(path), 4).nodes == 4


def test_ranks_out_of_order_are_refused_by_every_rank(pool):
    assert pool.run(2, _measure_on_rank, {"LOCAL_RANK": "0"}, "--measure", "--device", "cpu") == [2, 2]
    for output in pool.output:
        assert "rank 1 is number 0 on a node of 2" in output and "Traceback" not in output


@pytest.mark.parametrize(
    ("arguments", "pattern"),
    [
        (["--preset", "h100"], "unknown cluster preset 'h100'"),
        (["--preset", "h200-8x400g", "--nodes", "0"], "--nodes: 0 must be a whole number from 1"),
        (["--measure", "--nodes", "2"], "--nodes 2 has no effect with --measure"),
        (["--preset", "h200-8x400g", "--device", "cpu"], "--device cpu has no effect with --preset"),
        (
            ["--measure", "--json", "/proc/absent/cluster.json"],
            "there is no folder /proc/absent",
        ),
        pytest.param(
            ["--measure", "--device", "cuda"],
            "finds no CUDA device",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU"),
        ),
    ],
)
def test_bad_command_lines_say_why_in_one_line(arguments, pattern, capsys, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    assert main(arguments) == 2
    errors = capsys.readouterr().err
    assert pattern in errors and errors.count("\n") == 1
    assert errors.startswith("python -m balancing.cluster: error: ")


def test_the_command_line_shows_and_writes_a_preset(tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    for name in PRESETS:
        path = tmp_path / f"{name}.json"
        assert main(["--preset", name, "--nodes", "2", "--json", str(path)]) == 0
        assert f"2 x {PRESETS[name]['gpus']}" in capsys.readouterr().out
        assert Cluster.from_json(path) == Cluster.preset(name, nodes=2)

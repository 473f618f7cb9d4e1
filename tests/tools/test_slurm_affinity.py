"""scripts/slurm/affinity.sh on made-up machines: the GPU of a rank, the NIC next to it, the NUMA node of its cores."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from tests.support.patience import PATIENCE

AFFINITY = Path(__file__).resolve().parents[2] / "scripts" / "slurm" / "affinity.sh"


def sysfs(root: Path) -> Path:
    """Two sockets, three PCI trees: a GPU and two NICs in the first, a GPU in the second, two NICs in the third."""
    devices = {
        "pci0000:00/0000:00:01.0/0000:01:00.0": (0, None),
        "pci0000:00/0000:00:01.0/0000:02:00.0": (0, "mlx5_1"),
        "pci0000:00/0000:00:05.0/0000:03:00.0": (0, "mlx5_0"),
        "pci0000:80/0000:80:01.0/0000:81:00.0": (1, None),
        "pci0000:c0/0000:c0:01.0/0000:c1:00.0": (1, "mlx5_2"),
        "pci0000:c0/0000:c0:02.0/0000:c2:00.0": (1, "mlx5_3"),
    }
    for folder in ("bus/pci/devices", "class/infiniband", "class/net"):
        (root / folder).mkdir(parents=True)
    for path, (numa, nic) in devices.items():
        device = root / "devices" / path
        device.mkdir(parents=True)
        (device / "numa_node").write_text(f"{numa}\n")
        (root / "bus/pci/devices" / device.name).symlink_to(device)
        if nic is not None:
            (device / "infiniband" / nic).mkdir(parents=True)
            (device / "infiniband" / nic / "device").symlink_to(device)
            (root / "class/infiniband" / nic).symlink_to(device / "infiniband" / nic)
    for cpu in range(8):
        (root / f"devices/system/cpu/cpu{cpu}/node{cpu // 4}").mkdir(parents=True)
    return root


def shell(function: str, *arguments: str, **variables: str) -> str:
    """What a function of affinity.sh prints."""
    command = ["bash", "-c", 'source "$0"; "$@"', str(AFFINITY), function, *arguments]
    environment = {**os.environ, **variables}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE, check=True).stdout


def test_gpu_of_a_rank_is_counted_among_the_visible_ones(tmp_path: Path) -> None:
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/bash\n[[ $* == *--id=5* ]] && echo 00000000:1B:00.0 || exit 6\n")
    smi.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    assert shell("gpu_address", "1", PATH=path, CUDA_VISIBLE_DEVICES="4,5") == "0000:1b:00.0"
    assert shell("gpu_address", "5", PATH=path, CUDA_VISIBLE_DEVICES="") == "0000:1b:00.0"
    assert shell("gpu_address", "0", PATH=path, CUDA_VISIBLE_DEVICES="4,5") == ""  # nvidia-smi does not know it


def test_nearest_nic_follows_the_pci_tree_then_the_socket(tmp_path: Path) -> None:
    root = str(sysfs(tmp_path))
    assert shell("nearest_nic", "0000:01:00.0", "?", "0", root) == "mlx5_1 (same PCI root)"
    assert shell("nearest_nic", "0000:81:00.0", "?", "0", root) == "mlx5_2 (same NUMA node)"
    assert shell("nearest_nic", "0000:81:00.0", "?", "3", root) == "mlx5_3 (same NUMA node)"
    assert shell("nearest_nic", "", "0", "1", root) == "mlx5_1 (same NUMA node)"
    assert shell("nearest_nic", "", "7", "0", root) == "mlx5_0 (other NUMA node)"
    assert shell("nearest_nic", "", "?", "2", root) == "mlx5_2 (in turn)"
    assert shell("numa_of_cpus", "0-1,6", root) == "0,1"
    assert shell("numa_of_cpus", "4-7", root) == "1"
    shutil.rmtree(tmp_path / "class/infiniband")
    assert shell("nearest_nic", "", "0", "0", root) == "none"

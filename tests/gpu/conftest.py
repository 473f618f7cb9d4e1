"""What the parts share: each runs on the CPU device and, marked `gpu`, on GPUs, one at a time and in its time."""

import fcntl
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.gpu.parts import IMPORT_SECONDS, PARTS
from tests.gpu.ranks import OnCpu, OnGpus
from tests.gpu.verdicts import note


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "device" in metafunc.fixturenames:
        metafunc.parametrize(
            "device",
            [pytest.param("cpu", marks=pytest.mark.exhaustive), pytest.param("cuda", marks=pytest.mark.gpu)],
            scope="session",
        )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    start = float(os.environ.get("GPU_CHECK_START", IMPORT_SECONDS))
    seconds = {part.test: part.limit(start) for part in PARTS}
    for item in items:
        part = f"{item.path.name}::{getattr(item, 'originalname', '')}"
        if item.get_closest_marker("gpu") and part in seconds:
            item.add_marker(pytest.mark.limit(seconds[part]))


@pytest.fixture(scope="session")
def on_gpus() -> Iterator[OnGpus]:
    import torch

    nccl = torch.cuda.nccl.version() if torch.distributed.is_nccl_available() else ()
    ranks = OnGpus(torch.cuda.device_count(), nccl)
    yield ranks
    ranks.stop()


@pytest.fixture
def ranks(device: str, request: pytest.FixtureRequest) -> Iterator[OnCpu | OnGpus]:
    """Starts ranks on the device. Only one test uses the GPUs of a machine at a time."""
    if device == "cpu":
        yield OnCpu(request.getfixturevalue("pool"))
        return
    with (Path(tempfile.gettempdir()) / f"megatron-balance-gpus-{os.getuid()}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield request.getfixturevalue("on_gpus")


@pytest.fixture
def figure() -> Callable[[str], None]:
    """Notes what a part measured, for the table, at once: what a part had is kept where it is stopped."""
    results, part = os.environ.get("GPU_CHECK_RESULTS"), os.environ.get("GPU_CHECK_PART", "")
    return lambda text: note(Path(results), part, figure=text) if results else print(text)

"""What the parts share: each runs on the CPU device and, marked `gpu`, on GPUs, one at a time and in its time."""

import fcntl
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.gpu.parts import PARTS
from tests.gpu.ranks import OnCpu, OnGpus


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "device" in metafunc.fixturenames:
        metafunc.parametrize(
            "device",
            [pytest.param("cpu", marks=pytest.mark.exhaustive), pytest.param("cuda", marks=pytest.mark.gpu)],
            scope="session",
        )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    seconds = {part.test: part.seconds for part in PARTS}
    for item in items:
        part = f"{item.path.name}::{getattr(item, 'originalname', '')}"
        if item.get_closest_marker("gpu") and part in seconds:
            item.add_marker(pytest.mark.limit(seconds[part]))


@pytest.fixture(scope="session")
def on_gpus() -> Iterator[OnGpus]:
    import torch

    ranks = OnGpus(torch.cuda.device_count(), torch.cuda.nccl.version())
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
def figure(record_property: Callable[[str, object], None]) -> Callable[[str], None]:
    """Notes what a part measured, for the table."""
    return lambda text: record_property("figure", text)

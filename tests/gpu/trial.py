"""One run of a part on a device: it starts ranks, and notes figures and how far the part is.

Ranks are forks of a server that has imported Megatron-LM and has not touched CUDA (`tests/support/pool.py`). Where
there are fewer GPUs than ranks, several ranks share a GPU through a private MPS daemon where there is one; without one
their kernels take turns. NCCL 2.30 has a mode for ranks that share a GPU. An older one takes ranks on one host for a
mistake, so each rank says that it is a host of its own, and messages go through sockets: NCCL's kernels, streams and
rules, at no speed that means anything. Where NCCL does not talk at all, tensors are staged through the host
(`host_group.py`).

fp32 means fp32: cuBLAS is told not to round to TF32, which Transformer Engine's products do otherwise.
"""

import importlib
import os
import re
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.gpu.verdicts import note
from tests.support.corpus import write_documents
from tests.support.patience import PATIENCE
from tests.support.pool import Hang, Pool

__all__ = ["FP32", "TF32", "Cut", "Machine", "Notes", "Skipped", "Trial", "sharing"]

# A rank's kernels must leave room on the GPU for those of the ranks that they wait for.
_SHARING = {"NCCL_MAX_CTAS": "1", "NCCL_NVLS_ENABLE": "0"}
_AS_HOSTS = {
    "NCCL_HOSTID": "rank{rank}",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_NET": "Socket",
    "NCCL_IB_DISABLE": "1",
    "NCCL_MNNVL_ENABLE": "0",
}
FP32: dict[str, str | None] = {"NVIDIA_TF32_OVERRIDE": "0"}
TF32: dict[str, str | None] = {"NVIDIA_TF32_OVERRIDE": None}
_RUN_SECONDS = 120.0  # of one run on GPUs, which takes 10
_BUSY = "busy or unavailable"  # says a GPU for a while after processes that used it were killed
_WAITS = (2.0, 5.0, 10.0)


class Cut(Exception):
    """The part's time is over."""


class Skipped(Exception):
    """The part does not apply here."""


def sharing(ranks: int, gpus: int, nccl: tuple[int, ...]) -> dict[str, str]:
    """The environment in which `ranks` ranks run on `gpus` GPUs; "{rank}" in a value stands for each rank's number.
    nccl: its version."""
    if ranks <= gpus:
        return {}
    return _SHARING | ({"NCCL_MULTI_RANK_GPU_ENABLE": "1"} if nccl >= (2, 30) else _AS_HOSTS)


@dataclass(frozen=True)
class Notes:
    """What a part says while it runs, kept at once: what it had is known where it is cut. Ranks are given it, too."""

    part: str
    results: Path | None = None

    def figure(self, text: str) -> None:
        """For the table."""
        self._note(figure=text)

    def detail(self, text: str) -> None:
        """For the page behind the table, one line."""
        self._note(detail=text)

    def at(self, text: str) -> None:
        """What the part does from now on."""
        self._note(at=text)

    def _note(self, **what: str) -> None:
        if self.results is None:
            print(self.part, *what.values(), flush=True)
        else:
            note(self.results, self.part, **what)


@dataclass(frozen=True)
class Machine:
    """What ranks run on. gpus: how many, 0 for the CPU device. nccl: its version. mps: the environment of processes
    that share a GPU. staged: whether tensors go through the host."""

    gpus: int = 0
    nccl: tuple[int, ...] = ()
    mps: Mapping[str, str] = field(default_factory=dict)
    staged: bool = False

    @property
    def device(self) -> str:
        return "cuda" if self.gpus else "cpu"


class Trial:
    """folder: of the part, empty. seconds: until it is cut."""

    def __init__(self, pool: Pool, machine: Machine, notes: Notes, folder: Path, seconds: float = 3 * PATIENCE) -> None:
        self._pool, self._machine, self._notes, self.folder = pool, machine, notes, folder
        self.device, self.figure, self.detail, self.notes = machine.device, notes.figure, notes.detail, notes
        self._seconds, self._deadline = seconds, time.monotonic() + seconds
        self.runs, self.ranks, self._at = 0, 0, "no run"
        self._written: dict[str, str] = {}

    def work(self, test: str) -> None:
        """Do a part, by its `Part.test`. What is the body of a rank is imported there alone, with torch."""
        if ":" in test:
            self.run(1, _body, test, self.device, self.notes, what=test.partition(":")[2], seconds=self._seconds)
        else:
            module, _, function = test.partition(".")
            getattr(importlib.import_module(f"tests.gpu.{module}"), function)(self)

    def run(
        self,
        count: int,
        function: Callable,
        *args: Any,
        what: str = "",
        environment: Mapping[str, str | None] = {},
        seconds: float = _RUN_SECONDS,
        **kwargs: Any,
    ) -> list[Any]:
        """Call a function of a module on `count` ranks, as `Pool.run` does. what: of the part is done here.
        environment: more of it, on GPUs. seconds: until it is ended there."""
        self.runs, self.ranks = self.runs + 1, self.ranks + count
        self._at = f"run {self.runs}, {what or function.__name__.strip('_')}"
        self._notes.at(self._at)
        for wait in (*_WAITS, None):
            try:
                return self._once(count, function, args, environment, seconds, kwargs)
            except Hang as error:
                raise Cut(f"{self._cut(seconds)}, {_progress(str(error))}") from error
            except Exception as error:
                if wait is None or _BUSY not in " ".join([str(error), *getattr(error, "__notes__", ())]):
                    raise
                self.detail(f"the GPU was {_BUSY}; once more after {wait:.0f} s")
                time.sleep(wait)
        raise AssertionError

    def write_documents(self, documents: Iterable[Any], name: str = "documents") -> str:
        """The flags that train on these documents, which a rank writes, since that takes Megatron-LM."""
        if name not in self._written:
            (flags,) = self.run(1, write_documents, self.folder / name, list(documents))
            self._written[name] = " ".join(flags)
        return self._written[name]

    def _once(
        self, count: int, function: Callable, args: Any, environment: Mapping, seconds: float, kwargs: Any
    ) -> list[Any]:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise Cut(self._cut(seconds))
        machine = self._machine
        if not machine.gpus:
            return self._pool.run(count, function, *args, timeout=min(PATIENCE, left), **kwargs)
        shared = sharing(count, machine.gpus, machine.nccl)
        mine = {**FP32, **shared, **(machine.mps if shared else {}), **environment}
        if machine.staged and count > 1:
            mine["GPU_CHECK_STAGED"] = "1"
        seconds = min(seconds, left)
        return self._pool.run(
            count, _rank, function, *args, timeout=seconds, environment=mine, gpus=machine.gpus, **kwargs
        )

    def _cut(self, seconds: float) -> str:
        late = time.monotonic() >= self._deadline
        why = f"cut after {self._seconds:.0f} s" if late else f"a run did not end within {seconds:.0f} s"
        return f"{why}, in {self._at}"


def _progress(output: str) -> str:
    """How far a rank was by its output."""
    seen = re.findall(r"iteration\s+(\d+)/\s*(\d+)", output)
    return "iteration {} of {} done".format(*seen[-1]) if seen else "before its first iteration ended"


def _body(test: str, device: str, notes: Notes) -> None:
    module, _, function = test.partition(":")
    getattr(importlib.import_module(f"tests.gpu.{module}"), function)(device, notes)


def _rank(function: Callable, *args: Any, **kwargs: Any) -> Any:
    """The body of a rank on a GPU."""
    if os.environ.get("GPU_CHECK_STAGED"):
        from tests.gpu.host_group import use_host_groups

        use_host_groups()
    if os.environ.get("TORCH_CUDA_SANITIZER"):  # which torch looks at when it is imported
        from torch.cuda import _sanitizer

        _sanitizer.enable_cuda_sanitizer()
    return function(*args, **kwargs)

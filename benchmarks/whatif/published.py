"""Published steps, and what the forecast says of them."""

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from balancing.cluster import PRESETS, Cluster
from balancing_tools.whatif.forecast import schedule_seconds
from balancing_tools.whatif.job import Job, read_flags
from balancing_tools.whatif.step import FITTED, Efficiency, StepModel

__all__ = ["Published", "forecast_step", "machine", "read_published"]

_FILE = Path(__file__).with_name("published.json")


def forecast_step(model: StepModel) -> float:
    """Seconds of the balanced step: even routing, one document a sequence, the job's own layout."""
    costs = model.costs(model.works())
    seconds, _ = schedule_seconds(
        costs, model.job.plan, model.job.micro_batches, model.transfer_seconds(), model.job.schedule
    )
    return seconds + model.data_parallel_seconds(model.job.plan)


@dataclass(frozen=True)
class Published:
    """One measured step.

    source: of `published.json`.
    name: of the run.
    job: its flags.
    cluster: its machine.
    seconds: of a step.
    memory: bytes allocated on the fullest rank; None where not published.
    """

    source: str
    name: str
    job: Job
    cluster: Cluster
    seconds: float
    memory: float | None

    def error(self, efficiency: Efficiency = FITTED) -> float:
        """The forecast's step over the measured one, less 1."""
        return forecast_step(StepModel(self.job, self.cluster, efficiency)) / self.seconds - 1

    @property
    def memory_error(self) -> float | None:
        """The forecast's memory over the measured one, less 1."""
        if self.memory is None:
            return None
        return float(StepModel(self.job, self.cluster).memory(self.job.plan).max()) / self.memory - 1


@cache
def read_published() -> tuple[Published, ...]:
    """All rows of `published.json`."""
    content = json.loads(_FILE.read_text())
    found = []
    for row in content["rows"]:
        gib = row.get("memory_gib")
        found.append(Published(
            row["source"], row["name"], read_flags(shlex.split(row["flags"])).on(row["gpus"]),
            machine(row["cluster"], row["gpus"], content["clusters"]), row["step_seconds"],
            None if gib is None else gib * 1024**3,
        ))  # fmt: skip
    return tuple(found)


def machine(name: str, gpus: int, own: Mapping[str, Any] = MappingProxyType({})) -> Cluster:
    """So many GPUs of a preset, or of a machine of `own`, sheets as in `published.json`; racks have hosts of 4."""
    if name in own:
        sheet = own[name]
        return Cluster(nodes=gpus // sheet["ranks_per_node"], **sheet)
    return Cluster.from_spec(name, gpus, ranks_per_node=min(gpus, 4 if PRESETS[name]["gpus"] > 8 else 8))

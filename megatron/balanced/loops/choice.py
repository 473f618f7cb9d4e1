"""Settings of the balancers in an environment variable, for frameworks that construct the adapter themselves.

    MEGATRON_BALANCE='{"experts": {"replica_slots": 2}, "sequences": {}}'

Without the variable, only experts are balanced, with default settings.
"""

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from balancing.cluster import Cluster
from balancing.experts.config import ExpertConfig
from balancing.sequences.config import SequenceConfig
from megatron.balanced.loop import Balancers, ExpertBalancer, SequenceBalancer
from megatron.balanced.shared.callbacks import StepCallback
from megatron.balanced.shared.job import Job
from megatron.balanced.shared.process_groups import gather_objects

__all__ = ["VARIABLE", "Choice"]

VARIABLE = "MEGATRON_BALANCE"
_SETTINGS = {"experts": ExpertConfig, "sequences": SequenceConfig}


@dataclass(frozen=True)
class Choice:
    """Settings of the balancers; None leaves one off. cluster: hardware speeds. report: as for the balancers."""

    experts: ExpertConfig | None = None
    sequences: SequenceConfig | None = None
    cluster: Cluster | None = None
    report: Callable[[Callable[[], dict[str, Any]]], None] | None = None

    @classmethod
    def of_environment(cls) -> "Choice":
        """Read the settings from the variable. Raises ValueError for text that is not JSON and for unknown settings."""
        text = os.environ.get(VARIABLE, '{"experts": {}}')
        wanted = f"{VARIABLE}={text!r} is not a JSON object of settings, such as " + '{"experts": {"replica_slots": 2}}'
        try:
            given = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"{wanted}: {error}") from error
        if not isinstance(given, dict) or not given or not all(isinstance(value, dict) for value in given.values()):
            raise ValueError(wanted)
        made: dict[str, Any] = {}
        for name, settings in given.items():
            if name not in _SETTINGS:
                raise ValueError(f"{VARIABLE} has {name!r}; its keys are {' and '.join(_SETTINGS)}")
            try:
                made[name] = _SETTINGS[name](enabled=True, **settings)
            except TypeError as error:
                raise ValueError(f"{VARIABLE} has a setting of {name} that does not exist: {error}") from error
        return cls(**made)

    def around(
        self, chunks: Sequence[Any], job: Job, before: Callable[[dict[str, Any]], None] | None = None
    ) -> Balancers:
        """Make and install the balancers of these model chunks. All ranks call it together. before: as for
        `Balancers`."""
        told = repr((self.experts, self.sequences, self.cluster, os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS")))
        if len({*gather_objects(told, dist.group.WORLD)}) > 1:
            raise ValueError(
                "ranks have other settings of balancers or another CUDA_DEVICE_MAX_CONNECTIONS; set that and "
                f"{VARIABLE} alike on all nodes"
            )
        made: list[StepCallback] = []
        if self.experts is not None:
            made.append(ExpertBalancer(chunks, self.experts, job=job, cluster=self.cluster, report=self.report))
        if self.sequences is not None:
            made.append(SequenceBalancer(chunks, self.sequences, job=job, cluster=self.cluster, report=self.report))
        balancers = Balancers(*made, before=before)
        balancers.install()
        return balancers

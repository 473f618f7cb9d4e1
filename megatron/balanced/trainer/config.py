"""The settings of this package as one frozen dataclass, and the cluster that they describe.

The settings of each balancer are a dataclass of `balancing`. They come from flags and from the files of
`--balance-config`. A flag overrides a file.
"""

import argparse
import dataclasses
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from balancing.cluster import PRESETS, Cluster
from balancing.cluster.job_rates import measured_cluster
from balancing.experts.config import ExpertConfig
from balancing.launch import detect_launch
from balancing.layers.config import LayerConfig
from balancing.report import measured_lines
from balancing.sequences.config import SequenceConfig
from balancing.settings import SettingError, check_settings, setting
from balancing.trials import TrialConfig
from megatron.balanced.cpu.device import is_cpu
from megatron.balanced.shared.process_groups import DEFAULT_MACHINE, default_machine
from megatron.balanced.trainer.config_file import fields_of_file, read_file

__all__ = [
    "AUTO",
    "BalanceConfig",
    "ReportConfig",
    "add_flags",
    "cluster_from_flags",
    "config_from_flags",
    "rates_line",
]

AUTO = "auto"  # of --cluster


@dataclasses.dataclass(frozen=True)
class ReportConfig:
    """Settings of the report. Raises SettingError, a ValueError, for a value out of range."""

    interval: int = setting(
        10,
        "Gather and write the report's measurements every N iterations. All iterations are measured; a job that is "
        "killed loses at most the last N.",
        least=1,
    )

    def __post_init__(self) -> None:
        check_settings(self)


@dataclasses.dataclass(frozen=True)
class BalanceConfig:
    """All settings of a run, the same on all ranks. `dataclasses.asdict` of them can be written as JSON."""

    device: str = setting(
        "auto",
        "Where to train. auto uses CUDA if available. With cpu, Megatron-LM runs over gloo.",
        flag="--device",
        choices=("auto", "cuda", "cpu"),
    )
    fp64: bool = setting(
        False, "Train in float64, as an exact reference to compare other runs with (cpu only).", flag="--fp64"
    )
    balance: str | None = setting(
        None,
        "Balancers to switch on: a list such as experts,layers; or all, for every balancer that has something to "
        "balance and works with the other flags. A line at the start says which balancers stay off and why. Each "
        "balancer also has a flag of its own.",
        flag="--balance",
        metavar="all|LIST",
    )
    balance_report: str | None = setting(
        None,
        "Measure which ranks are slow, why and by how much, and write events.jsonl and trace.json into DIR. Also works "
        "without balancers. Read it with: python -m balancing.report DIR",
        flag="--balance-report",
        metavar="DIR",
    )
    cluster: str | None = setting(
        None,
        "Compute and link speeds for the planners' cost model: "
        f"{', '.join(PRESETS)}, a file that python -m balancing.cluster --measure wrote, the DIR of an earlier run's "
        "--balance-report, or auto: what this job's --balance-report DIR measures and has measured before. Without it, "
        "sequences are planned for H200 GPUs (on CPUs by area), and the other balancers balance load without regard to "
        "costs.",
        flag="--cluster",
        metavar="PRESET|FILE|DIR|auto",
    )
    fill_with_weight_gradients: bool = setting(
        False,
        "Compute weight gradients while pipeline stages wait for messages. Losses do not change, and no stage needs "
        "more activation memory than the fullest stage does without the flag.",
        flag="--fill-with-weight-gradients",
    )
    balance_dry_run: bool = setting(
        False,
        "Print the patches of Megatron-LM, the ranks that would plan together and the memory of replica slots, and "
        "stop before training. Without a launcher, WORLD_SIZE ranks on GPUs are assumed.",
        flag="--balance-dry-run",
    )
    experts: ExpertConfig = dataclasses.field(default_factory=ExpertConfig)
    sequences: SequenceConfig = dataclasses.field(default_factory=SequenceConfig)
    layers: LayerConfig = dataclasses.field(default_factory=LayerConfig)
    report: ReportConfig = dataclasses.field(default_factory=ReportConfig)
    trials: TrialConfig = dataclasses.field(default_factory=TrialConfig)

    @property
    def balances(self) -> bool:
        """Whether any balancer is on."""
        return self.experts.enabled or self.sequences.enabled or self.layers.enabled


# Section of a file -> its config. Each is the field of that name of `BalanceConfig`.
SECTIONS: dict[str, type] = {
    "experts": ExpertConfig,
    "sequences": SequenceConfig,
    "layers": LayerConfig,
    "report": ReportConfig,
    "trials": TrialConfig,
}
# Section -> the argument of the flag without which the section has no effect.
_SWITCHES = {
    "experts": "balance_experts",
    "sequences": "balance_sequences",
    "layers": "balance_layers",
    "report": "balance_report",
}
_FILES = (
    "A YAML file of settings by section, such as experts: {min_gain: 0.08}; the documentation of each balancer lists "
    "them. May be given several times: a later file overrides an earlier one, and a flag overrides all files."
)


def _flags(config: type) -> Iterator[tuple[dataclasses.Field, str, str]]:
    """Fields of a config that have a flag, with the flag and the argument that it sets."""
    for field in dataclasses.fields(config):
        if flag := field.metadata.get("flag"):
            yield field, flag, flag[2:].replace("-", "_")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of all configs. Flags of sections default to None: a file may set what no flag sets."""
    balancing = parser.add_argument_group("load balancing", "Megatron-Balance's own flags; all off by default.")
    for config in (BalanceConfig, *SECTIONS.values()):
        for field, flag, _ in _flags(config):
            default = field.default if config is BalanceConfig else None
            if field.type is bool:
                balancing.add_argument(flag, action="store_true", default=default, help=field.metadata["help"])
                continue
            kind = {int: int, float | None: float}.get(field.type, str)  # type: ignore[call-overload]
            choices, metavar = field.metadata["choices"] or None, field.metadata["metavar"]
            balancing.add_argument(
                flag, type=kind, default=default, choices=choices, metavar=metavar, help=field.metadata["help"]
            )
    balancing.add_argument("--balance-config", action="append", metavar="FILE", help=_FILES)


@dataclasses.dataclass(frozen=True)
class _Given:
    """A setting that the user gave. shown: its place, such as "--expert-replica-slots" or "FILE: experts.min_gain"."""

    value: Any
    shown: str

    def __str__(self) -> str:
        return self.shown if self.value is True and self.shown.startswith("--") else f"{self.shown} {self.value}"


def config_from_flags(args: argparse.Namespace, device: str) -> tuple[BalanceConfig, list[str]]:
    """The config from parsed flags and the files of `--balance-config`, and notes for the user, one line each.

    Sets arguments that were not given to the values in force. device: "cuda" or "cpu", in the place of "auto". Raises
    ValueError, in one line, for a bad file, a value out of range, or a setting without effect.
    """
    if args.balance_report == "":
        raise ValueError("--balance-report '' names no directory; give one, or drop it")
    notes = []
    given: dict[str, dict[str, _Given]] = {section: {} for section in SECTIONS}
    for path in args.balance_config or []:
        found = read_file(path, SECTIONS)
        for section, values in found.items():
            given[section] |= {
                name: _Given(value, f"--balance-config {path}: {section}.{name}") for name, value in values.items()
            }
        named = [f"{section}.{name} {value}" for section, values in found.items() for name, value in values.items()]
        notes.append(f"--balance-config {path}: {', '.join(named) or 'no settings'}")
    sections = {section: _section(args, section, given[section]) for section in SECTIONS}
    values = {field.name: getattr(args, argument) for field, _, argument in _flags(BalanceConfig)}
    config = BalanceConfig(**values | {"device": device} | sections)
    if given["trials"] and not (config.balances or config.trials.steps):  # with steps `check_trials` says why
        raise ValueError(f"{next(iter(given['trials'].values()))} does nothing without a balancer; add one, or drop it")
    return config, notes


def _section(args: argparse.Namespace, section: str, given: dict[str, _Given]) -> Any:
    """The config of a section. given: the user's settings in files."""
    kind = SECTIONS[section]
    switches: dict[str, bool] = {}
    for field, flag, argument in _flags(kind):
        value = getattr(args, argument)
        if field.name not in fields_of_file(kind):
            switches[field.name] = bool(value)
        elif value is not None:
            given[field.name] = _Given(value, flag)
    if given and section in _SWITCHES and not getattr(args, _SWITCHES[section]):
        switch = "--" + _SWITCHES[section].replace("_", "-")
        raise ValueError(f"{next(iter(given.values()))} does nothing without {switch}; add that, or drop it")
    try:
        config = kind(**switches, **{name: each.value for name, each in given.items()})
    except SettingError as error:
        shown = given[error.name].shown if error.name in given else f"{section}.{error.name}"
        raise ValueError(f"{shown} {error.value} {error.why}") from None
    for field, _, argument in _flags(kind):
        setattr(args, argument, getattr(config, field.name))
    return config


def rates_line(config: BalanceConfig, cluster: Cluster | None) -> str:
    """What experts and sequences are planned by, and whether that was measured.

    cluster: of `cluster_from_flags`.
    """
    rates = (cluster or default_machine(on_cpus=is_cpu())).rates
    if rates is None:
        how = "one for attention of any length, not measured here"
    elif rates.source.startswith("measured"):  # by a job
        how = rates.source
    else:
        how = f"{'measured on' if rates.measured else 'not measured:'} {rates.source}"
    line = f"rates: --cluster {config.cluster}, {how}"
    if cluster is None:
        line = f"rates: those of {'CPU cores over gloo' if is_cpu() else f'a {DEFAULT_MACHINE}'}, {how}"
        line += "; transfers of replicas have no price" * config.experts.enabled
    return line if config.cluster is not None else f"{line}; --cluster auto takes what this job measures"


def cluster_from_flags(config: BalanceConfig, world_size: int) -> Cluster | None:
    """The cluster that `--cluster` describes, read once. None without that flag, and for `auto` without measurements
    yet.

    Raises ValueError if it does not fit the ranks of this job.
    """
    if config.cluster is None:
        return None
    if config.cluster == AUTO and config.balance_report is None:
        raise ValueError("--cluster auto takes what --balance-report measures; add --balance-report DIR")
    return _read_cluster(config.cluster, config.balance_report, world_size, detect_launch().ranks_per_node)


@cache  # what ranks have compared is what they plan by, though a report that is named may grow meanwhile
def _read_cluster(given: str, report: Path | str | None, world_size: int, per_node: int) -> Cluster | None:
    folder = report if given == AUTO else given if Path(given).is_dir() else None
    if folder is None:
        return Cluster.from_spec(given, world_size, ranks_per_node=per_node)
    base = default_machine(on_cpus=is_cpu()).relabel(max(1, world_size // per_node), min(per_node, world_size))
    try:
        found = measured_cluster(base, measured_lines(folder))
    except ValueError as error:
        raise ValueError(f"--cluster {given}: {Path(folder) / 'events.jsonl'}: {error}; name another report") from error
    if found is None and given != AUTO:
        raise ValueError(
            f"--cluster {given}: the report has not measured enough calls of balanced attention or experts; record a "
            "longer run with --balance-report, or name a preset"
        )
    return None if found is None else found[0]

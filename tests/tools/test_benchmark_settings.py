"""Benchmarks run what ships: none states a setting that a default config has, unless its rows say so."""

import ast
import dataclasses
from collections.abc import Iterator
from pathlib import Path

from balancing.experts.config import ExpertConfig
from balancing.layers.config import LayerConfig
from balancing.layers.gate import GateConfig
from balancing.sequences.config import SequenceConfig

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
CONFIGS = (ExpertConfig, LayerConfig, SequenceConfig, GateConfig)
FIELDS = {field.name: field.default for config in CONFIGS for field in dataclasses.fields(config)}
# "expert_replica_slots" is given as slots=, too.
NAMES = {
    name.split("_", start)[-1]
    for name, default in FIELDS.items()
    if not isinstance(default, bool | str)
    for start in range(name.count("_") + 1)
} - {"stages"}  # of a pipeline

# Where and what, and how its rows or its page say so.
STATED = {
    ("experts/emulated.py", "slots", 8): "rows named '8 slots', of planners that need more than two",
    ("idle.py", "expert_min_gain", None): "nothing is worth a replica, so that only the cost of looking is left",
    ("layers/plans.py", "min_stages", 2): "rows are named by their number of stages",
    ("layers/training.py", "layer_balance_interval", None): "a line above the table",
    ("together/workload.py", "layer_balance_interval", None): "a line above the table",
    ("together/workload.py", "sequence_planner", None): "a line above the table",
    ("sequences/training.py", "sequence_planner", None): "rows are named by planner",
    ("whatif/gains.py", "sequence_micro_batches", None): "the job's own flags",
}


def _stated(tree: ast.AST) -> Iterator[tuple[str, float | None]]:
    """Settings that a benchmark states: keywords, defaults and constants with their numbers, and flags."""
    for node in ast.walk(tree):
        match node:
            case ast.keyword(arg=str(name), value=ast.Constant(value=value)) if name in NAMES:
                pass
            case (
                ast.AnnAssign(target=ast.Name(id=name), value=ast.Constant(value=value))
                | ast.Assign(targets=[ast.Name(id=name)], value=ast.Constant(value=value))
            ) if name.strip("_").lower() in NAMES:
                pass
            case ast.Constant(value=str(text)):
                yield from ((name, None) for name in _flags(text) if name in FIELDS)
                continue
            case _:
                continue
        if isinstance(value, int | float) and not isinstance(value, bool):
            yield name.strip("_").lower(), value


def _flags(text: str) -> Iterator[str]:
    """Names of the flags of a command line; no prose has two hyphens at the start of its first word."""
    words = text.split()
    if words and words[0].startswith("--"):
        yield from (word[2:].replace("-", "_") for word in words if word.startswith("--"))


def test_no_benchmark_states_a_setting_that_a_default_config_has():
    found = {
        (str(path.relative_to(BENCHMARKS)), *setting)
        for path in sorted(BENCHMARKS.rglob("*.py"))
        for setting in _stated(ast.parse(path.read_text(encoding="utf-8")))
        if not setting[0].startswith("balance_")  # switches
    }
    assert found == set(STATED)


def test_what_counts_as_stated():
    code = "Gate(GateConfig(min_gain=0.01, horizon=40))\n_SLOTS = 3\nx = '--x --layer-min-gain 0'\nrun(method='quota')"
    assert set(_stated(ast.parse(code))) == {
        ("min_gain", 0.01),
        ("horizon", 40),
        ("slots", 3),
        ("layer_min_gain", None),
    }

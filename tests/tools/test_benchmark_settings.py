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
FIELDS = [field for config in CONFIGS for field in dataclasses.fields(config)]
FLAGS = {field.metadata["flag"] for field in FIELDS if field.metadata.get("flag")}
# "replica_slots" is given as slots=, too.
NAMES = {
    field.name.split("_", start)[-1]
    for field in FIELDS
    if not isinstance(field.default, bool | str)
    for start in range(field.name.count("_") + 1)
} - {"stages"}  # of a pipeline

# Where and what, and how its rows or its page say so.
STATED = {
    ("experts/emulated.py", "slots", 8): "rows named '8 slots', of planners that need more than two",
    ("experts/modelled.py", "slots", 0): "a bound, of a layer without replicas",
    ("experts/plans.py", "min_gain", 0.0): "its log says so: the gate of training knows the drift",
    ("idle.py", "experts.min_gain", None): "nothing is worth a replica, so that only the cost of looking is left",
    ("layers/training.py", "--layer-balance-interval", None): "a line above the table",
    ("together/workload.py", "--layer-balance-interval", None): "a line above the table",
    ("together/workload.py", "sequences.planner", None): "a line above the table",
    ("sequences/training.py", "sequences.planner", None): "rows are named by planner",
    ("trials/real.py", "trials.interval", None): "its page says so, beside the table",
    ("trials/real.py", "trials.share", None): "its page says so, beside the table",
    ("whatif/gains.py", "--sequence-micro-batches", None): "the job's own flags",
}


def _stated(tree: ast.AST) -> Iterator[tuple[str, float | None]]:
    """Settings that a benchmark states: keywords, defaults and constants with their numbers, flags, and files."""
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Name(id="settings"), args=[ast.Constant(value=str(section))]):
                yield from ((f"{section}.{each.arg}", None) for each in node.keywords)
                for each in node.keywords:
                    each.arg = None  # which is no keyword of a call that is measured
                continue
            case ast.keyword(arg=str(name), value=ast.Constant(value=value)) if name in NAMES:
                pass
            case (
                ast.AnnAssign(target=ast.Name(id=name), value=ast.Constant(value=value))
                | ast.Assign(targets=[ast.Name(id=name)], value=ast.Constant(value=value))
            ) if name.strip("_").lower() in NAMES:
                pass
            case ast.Constant(value=str(text)):
                yield from ((flag, None) for flag in _flags(text) if flag in FLAGS)
                continue
            case _:
                continue
        if isinstance(value, int | float) and not isinstance(value, bool):
            yield name.strip("_").lower(), value


def _flags(text: str) -> Iterator[str]:
    """The flags of a command line; no prose has two hyphens at the start of its first word."""
    words = text.split()
    if words and words[0].startswith("--"):
        yield from (word for word in words if word.startswith("--"))


def test_no_benchmark_states_a_setting_that_a_default_config_has():
    found = {
        (str(path.relative_to(BENCHMARKS)), *setting)
        for path in sorted(BENCHMARKS.rglob("*.py"))
        for setting in _stated(ast.parse(path.read_text(encoding="utf-8")))
        if not setting[0].startswith("--balance-")  # switches
    }
    assert found == set(STATED)


def test_what_counts_as_stated():
    code = "Gate(GateConfig(min_gain=0.01, horizon=40))\n_SLOTS = 3\nx = '--x --layer-balance-interval 0'\n"
    code += "run(method='quota')\nsettings('layers', planner='diffusion', min_gain=0)"
    assert set(_stated(ast.parse(code))) == {
        ("min_gain", 0.01),
        ("horizon", 40),
        ("slots", 3),
        ("--layer-balance-interval", None),
        ("layers.planner", None),
        ("layers.min_gain", None),
    }

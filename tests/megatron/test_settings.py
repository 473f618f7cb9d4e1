"""`--balance-config FILE`: what a file sets, who wins, and files that are refused in one line."""

import argparse
import dataclasses
import json
import re
from pathlib import Path

import pytest

from megatron.balanced.trainer.config import SECTIONS, BalanceConfig, add_flags, config_from_flags
from megatron.balanced.trainer.config_file import fields_of_file, read_file

PAGES = Path(__file__).resolve().parents[2] / "docs"


def _config(flags: str, tmp_path: Path, *files: str) -> tuple[BalanceConfig, argparse.Namespace, list[str]]:
    """The config of a command line with files of these contents."""
    parser = argparse.ArgumentParser()
    add_flags(parser)
    argv = flags.split()
    for number, content in enumerate(files):
        path = tmp_path / f"{number}.yaml"
        path.write_text(content)
        argv += ["--balance-config", str(path)]
    args = parser.parse_args(argv)
    config, notes = config_from_flags(args, "cpu")
    return config, args, notes


def test_a_file_sets_fields_and_the_last_file_and_flags_win(tmp_path):
    first = "experts: {min_gain: 1e-3, replica_slots: 4, planner: prophet}\n"
    second = "experts: {planner: none}\nlayers: {repack_memory_limit: 8, interval: 7}\nreport: {interval: 5}\n"
    flags = "--balance-experts --expert-replica-slots 3 --balance-layers --balance-report report"
    config, args, notes = _config(flags, tmp_path, first, second)
    experts = config.experts
    assert (experts.enabled, experts.min_gain, experts.replica_slots, experts.planner) == (True, 1e-3, 3, "none")
    assert (config.layers.repack_memory_limit, config.layers.interval, config.report.interval) == (8.0, 7, 5)
    assert (args.expert_replica_slots, args.layer_balance_interval) == (3, 7)
    assert len(notes) == 2 and "experts.min_gain 0.001" in notes[0] and "report.interval 5" in notes[1]


def test_without_a_file_all_is_as_the_configs_say(tmp_path):
    config, args, notes = _config("", tmp_path)
    assert config == BalanceConfig(device="cpu") and notes == []
    assert (args.sequence_domain, args.sequence_micro_batches, args.balance_experts) == ("auto", False, False)


def test_a_config_is_json(tmp_path):
    """What ranks compare."""
    config, *_ = _config("--balance-layers", tmp_path, "layers: {interval: 7}")
    values = json.loads(json.dumps(dataclasses.asdict(config)))
    assert values["layers"]["enabled"] and values["layers"]["interval"] == 7
    assert values["experts"]["min_gain"] == 0.02


# content, flags, and the words that the line must have beside the name of the file
REFUSED = {
    "section": ("expert: {min_gain: 0}", "", "'expert' is not a section", "experts, sequences, layers, report"),
    "field": ("experts: {gain: 0}", "", "experts has no field 'gain'", "replica_slots, late_slots", "min_gain"),
    "switch": ("experts: {enabled: true}", "", "experts has no field 'enabled'"),
    "no mapping": ("experts: 3", "", "experts 3 does not map", "min_gain"),
    "no sections": ("- experts", "", "has no sections", "experts, sequences"),
    "nothing": ("", "", "has no sections"),
    "text for a number": ("experts: {min_gain: much}", "", "experts.min_gain 'much' is not a number"),
    "number for a text": ("experts: {planner: 3}", "", "experts.planner 3 is not a string"),
    "fraction": ("layers: {interval: 1.5}", "", "layers.interval 1.5 is not a whole number"),
    "switch for a number": ("layers: {interval: true}", "", "layers.interval True is not a whole number"),
    "number for a switch": ("sequences: {micro_batches: 1}", "", "sequences.micro_batches 1 is not true or false"),
    "null": ("layers: {min_gain: null}", "", "layers.min_gain None is not a number"),
    "range": ("layers: {min_gain: 1}", "--balance-layers", "layers.min_gain 1.0 must be at least 0 and below 1"),
    "not a number": ("layers: {min_gain: .nan}", "--balance-layers", "layers.min_gain nan must be"),
    "infinite": ("layers: {repack_memory_limit: .inf}", "--balance-layers", "inf must be above 0, and finite"),
    "choice": ("layers: {planner: best}", "--balance-layers", "layers.planner best is none of", "optimal, diffusion"),
    "balancer that is off": ("layers: {min_gain: 0.1}", "", "min_gain 0.1 does nothing without --balance-layers"),
    "report": ("report: {interval: 3}", "", "report.interval 3 does nothing without --balance-report"),
    "trials": ("trials: {pairs: 0}", "", "trials.pairs 0 does nothing without a balancer; add one, or drop it"),
    "alias": ("a: &a [1]\nexperts: *a", "", "has an alias, *a"),
    "twice": ("experts: {min_gain: 0}\nexperts: {planner: none}", "", "has experts twice"),
    "field twice": ("experts: {min_gain: 0, min_gain: 0.5}", "", "has min_gain twice"),
    "tag": ("experts: !!python/object/apply:os.getcwd []", "", "is not YAML", "python/object"),
    "no YAML": ("experts: {", "", "is not YAML"),
    "nested": ("[" * 100_000, "", "is nested too deeply"),
    "many digits": ("layers: {interval: " + "1" * 5000 + "}", "", "is not YAML", "digits"),
    "long": ("layers: {min_gain: " + "x" * 5000 + "}", "", "layers.min_gain 'xxx", "... is not a number"),
    "large": ("#" * 1_000_001, "", "has more than 1000000 bytes"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_file_is_refused_in_one_line(tmp_path, case):
    content, flags, *words = REFUSED[case]
    with pytest.raises(ValueError) as refused:
        _config(flags, tmp_path, content)
    line = str(refused.value)
    assert line.startswith(f"--balance-config {tmp_path / '0.yaml'}") and "\n" not in line and len(line) < 600
    for word in words:
        assert word in line, line


def test_a_flag_is_named_where_it_is_wrong(tmp_path):
    with pytest.raises(ValueError, match=r"^--expert-replica-slots -1 must be at least 0$"):
        _config("--balance-experts --expert-replica-slots -1", tmp_path, "experts: {replica_slots: 3}")


@pytest.mark.parametrize("name", ["absent.yaml", "."])
def test_what_is_no_file(tmp_path, name):
    with pytest.raises(ValueError, match="is not a file; name one"):
        read_file(str(tmp_path / name), SECTIONS)


def test_twenty_flags_of_our_own_at_most():
    parser = argparse.ArgumentParser(add_help=False)
    add_flags(parser)
    assert len(parser._actions) <= 20


@pytest.mark.parametrize("section", SECTIONS)
def test_every_setting_is_documented(section):
    """A flag in the table of flags of its page, and each field in the one of fields."""
    page = (PAGES / f"{section}.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    for name, field in fields_of_file(SECTIONS[section]).items():
        assert any(re.search(rf"`{name}`", row) for row in rows), f"docs/{section}.md has no row of {name}"
        if flag := field.metadata["flag"]:
            assert any(re.search(rf"`{flag}(?![\w-])", row) for row in rows), f"docs/{section}.md has no row of {flag}"

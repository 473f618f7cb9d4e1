"""Other versions of Megatron-LM: what is there decides, and a missing piece is named."""

import re
from pathlib import Path

import pytest

from balancing.doctor.installed import find_megatron
from megatron.balanced.trainer.checks import megatron as versions


def _install(monkeypatch: pytest.MonkeyPatch, version: str, core: Path) -> None:
    found = {"version": version, "core": str(core), "training": True, "dataset_helper": "compiled"}
    monkeypatch.setattr(versions, "find_megatron", lambda: found)
    versions._statements.cache_clear()


def test_the_tested_version_has_all_pieces_and_is_not_remarked_on(monkeypatch):
    core = Path(find_megatron()["core"])
    assert versions.check_megatron() == []
    _install(monkeypatch, "0.19.9", core)
    assert versions.check_megatron() == ["megatron-core 0.19.9 is accepted, not tested; 0.19.0 and 0.19.2 are"]


@pytest.mark.parametrize(
    ("file", "cut", "missing"),
    [
        ("core/transformer/transformer_block.py", r"def _get_block_submodules", "no _get_block_submodules in core/"),
        (
            "core/distributed/distributed_data_parallel.py",
            r"full_param_layout",
            "no 'full_param_layout' in Distributed",
        ),
        ("training/models/hybrid.py", None, "no HybridModelConfig in training/models/hybrid.py"),
    ],
)
def test_a_missing_piece_is_named(monkeypatch, tmp_path, file, cut, missing):
    installed = Path(find_megatron()["core"]).parent
    for probed, *_ in versions.PROBES:
        there = tmp_path / "megatron" / probed
        there.parent.mkdir(parents=True, exist_ok=True)
        text = (installed / probed).read_text()
        if probed == file and cut is not None:
            text = re.sub(cut, cut + "_of_another_version", text)
        if probed != file or cut is not None:
            there.write_text(text)
    _install(monkeypatch, "0.17.0", tmp_path / "megatron/core")
    with pytest.raises(ValueError) as refused:
        versions.check_megatron()
    line = str(refused.value)
    assert missing in line and line.endswith("pip install megatron-core==0.19.2") and "\n" not in line


def test_every_probe_is_of_what_is_installed():
    installed = Path(find_megatron()["core"]).parent
    for file, name, parameters in versions.PROBES:
        has = versions._has(installed / file, name)
        assert has is not None and not set(parameters) - has, name

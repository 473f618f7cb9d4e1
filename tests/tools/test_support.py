"""The page of what works: cells say tested, not run or which GPU; what is refused is what the table of checks has. The
tiers of tests name what there is."""

from pathlib import Path

from megatron.balanced.shared import incompatible
from megatron.balanced.shared.incompatible import INCOMPATIBLE, shown
from tests.support import tiers

PAGE = (Path(__file__).parents[2] / "docs/support.md").read_text()
FEATURES_PART = PAGE.partition("\n## Features\n")[2].partition("\n## ")[0]
ROWS = [line.strip("|").split(" | ") for line in FEATURES_PART.splitlines() if line.startswith("| ")]
# Feature of the checks -> flags that ask for it.
FEATURES = {
    incompatible.EXPERTS: "`--balance-experts`",
    incompatible.OWN_EXPERTS: "`--balance-experts` without `--moe-grouped-gemm` of Transformer Engine",
    incompatible.SEQUENCES: "`--balance-sequences`",
    incompatible.SEQUENCES_OF_DATA: "`--balance-sequences --sequence-domain data`",
    incompatible.SEQUENCES_OF_STEP: "`--sequence-micro-batches`",
    incompatible.LAYERS: "`--balance-layers`",
    incompatible.RELEASE: "`--repack-throughput-floor`",
    incompatible.FILL: "`--fill-with-weight-gradients`",
    incompatible.HYBRID: "`--hybrid-layer-pattern`",
    incompatible.HYBRID_SEGMENTS: "`--hybrid-layer-pattern` with `\\|`",
    incompatible.REPORT: "`--balance-report`",
}


def test_every_cell_says_what_was_seen():
    features = [row for row in ROWS[1:] if not row[0].strip().startswith("**")]
    assert len(features) > 30
    for row in features:
        assert len(row) == 3, row
        assert row[1].strip().startswith(("tested", "not run")), row
        assert row[2].strip() == "not run" or row[2].strip().startswith("one H100"), row


def refused() -> str:
    """The table of refused combinations, in markdown."""
    lines = ["| with | refused |", "|---|---|"]
    for feature, asked in FEATURES.items():
        works: dict[str, set[object]] = {}
        for row in INCOMPATIBLE:
            if feature in row.features:
                works[row.flag] = works.get(row.flag, set(row.allowed)) & set(row.allowed)
        flags = []
        for flag, allowed in works.items():
            but = sorted(str(value) for value in allowed if isinstance(value, str))
            flags.append(f"`{shown(flag, True)}`" + (f" other than {', '.join(but)}" if but else ""))
        lines.append(f"| {asked} | {', '.join(sorted(flags))} |")
    return "\n".join(lines) + "\n"


def test_what_is_refused_is_listed():
    assert {feature for row in INCOMPATIBLE for feature in row.features} == set(FEATURES)
    assert refused() in PAGE, f"write this into docs/support.md:\n{refused()}"


def test_the_tiers_name_files_that_are_there():
    tests = Path(__file__).parents[1]
    listed = {f"{folder}/test_{name}.py" for folder, names in tiers._FILES.items() for name in names.split()}
    listed |= {f"{folder}/{name}.py" for folder, names in tiers._FOLDERS.items() for name in names}
    assert not [name for name in listed if not (tests / name).exists()]
    assert all((tests / folder).is_dir() for folder in tiers._FOLDERS)


def test_the_first_tier_has_what_tells_most():
    kept = (
        "experts/test_plan experts/test_training sequences/test_plan sequences/test_training layers/test_plan "
        "layers/test_move layers/test_checkpoints together/test_all_balancers loops/test_contract megatron/test_parity "
        "megatron/test_bad_input tools/test_docs tools/test_arrows"
    )
    for name in kept.split():
        assert not tiers.is_thorough(*name.split("/")), name

"""`python -m tests.support.limits`: write the table of incompatible flags and config fields into the documents."""

import re
from collections.abc import Callable, Iterable
from pathlib import Path

from megatron.balanced.shared import incompatible
from megatron.balanced.shared.incompatible import INCOMPATIBLE, LOOPS, TRAINER, Incompatible, Values, shown

__all__ = ["BALANCERS", "DOCS", "FEATURES", "LATER", "PAGES", "written"]

DOCS = Path(__file__).parents[2] / "docs"
BEGIN = "<!-- python -m tests.support.limits writes what follows -->\n"
END = "<!-- it wrote what precedes -->\n"
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
    incompatible.FP64: "`--fp64`",
    incompatible.HYBRID: "`--hybrid-layer-pattern`",
    incompatible.HYBRID_SEGMENTS: "`--hybrid-layer-pattern` with `\\|`",
    incompatible.LATE: "`late_slots` of experts",
}
# Feature -> the balancer of other loops that is checked for it.
BALANCERS = {
    incompatible.EXPERTS: "`ExpertBalancer`",
    incompatible.ATTENTION: "`SequenceBalancer`",
    incompatible.LAYERS: "`LayerBalancer`",
}
LATER = ("moe_enable_echo", "moe_enable_scheduler")  # fields of Megatron-LM after 0.19.2, whose flags it lacks


def _in_words(name: str, values: Values) -> str:
    """Values of a flag or field, in markdown."""
    named = ", ".join(map(str, values.named))
    if not values.others:
        return f"`{name} {named}`"
    return f"`{name}`" + (f" other than {named}" if named else "")


def _lines(
    rows: Iterable[Incompatible], name: Callable[[str], str], reason: Callable[[Incompatible], str]
) -> list[str]:
    """Lines of a table; rows with the same reason share one. name: how a flag is called. reason: the further cells."""
    flags: dict[str, list[str]] = {}
    for row in rows:
        beside = [_in_words(name(flag), values) for flag, values in row.only_with.items()]
        rest = f"{', with ' if beside else ''}{' and '.join(beside)} | {reason(row)} |"
        flags.setdefault(rest, []).append(_in_words(name(row.flag), row.values))
    return [f"| {', '.join(of_row)}{rest}" for rest, of_row in flags.items()]


def _since(row: Incompatible, instead: str) -> str:
    """Reason and way out, in markdown."""
    text = row.why if row.instead == "drop it" else f"{row.why}; {instead}"
    return re.sub(r"(--[a-z0-9-]+)", r"`\1`", text).replace("|", "\\|")


def _flags() -> str:
    """The table of `pretrain_gpt.py`: a part for each feature."""
    parts = []
    for feature, asked in FEATURES.items():
        for what, off in (("refused", False), ("switched off, with a note,", True)):
            rows = [
                row
                for row in INCOMPATIBLE
                if feature in row.features and row.where in (None, TRAINER) and row.switches_off == off
            ]
            lines = _lines(
                rows,
                lambda flag: flag if flag in LATER else shown(flag, True),
                lambda row: row.why if row.switches_off else _since(row, row.instead),
            )
            if lines:
                parts.append("\n".join([f"| {what} with {asked} | since |", "|---|---|", *lines]))
    return "\n\n".join(parts) + "\n"


def _fields() -> str:
    """The table of other loops: what is refused there only."""
    rows = [
        row
        for row in INCOMPATIBLE
        if row.where == LOOPS or (row.where is None and (row.switches_off or incompatible.ATTENTION in row.features))
    ]

    def reason(row: Incompatible) -> str:
        of_row = [balancer for feature, balancer in BALANCERS.items() if feature in row.features]
        balancers = "every balancer" if len(of_row) == len(BALANCERS) else ", ".join(of_row)
        return f"{balancers} | {_since(row, row.instead_of_field)}"

    return "\n".join(["| refused | with | since |", "|---|---|---|", *_lines(rows, str, reason)]) + "\n"


PAGES: dict[str, Callable[[], str]] = {"support.md": _flags, "any_loop.md": _fields}


def written(page: str) -> str:
    """The text of a page of docs/ with its table as it should be."""
    text = (DOCS / page).read_text()
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    assert begin and end, f"{page} has no place for the table"
    return f"{before}{begin}\n{PAGES[page]()}\n{end}{after}"


if __name__ == "__main__":
    for page in PAGES:
        (DOCS / page).write_text(written(page))

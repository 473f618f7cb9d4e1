"""Command lines that are refused: every rank exits with 2, and one of them says why in one line.

A job of two ranks parses many command lines one after the other, each as a start of its own, since starting ranks takes
longer than parsing.
"""

import contextlib
import io
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tests.support.program import parse

__all__ = ["assert_accepted", "assert_refused", "parse_line", "parsed", "started_anew"]

Said = tuple[object, str]  # the exit code, "none" when a command line was accepted, and stderr


def parse_line(argv: list[str]) -> Said:
    """Parse a command line on this rank."""
    stderr = io.StringIO()
    with contextlib.redirect_stderr(stderr):
        try:
            parse(argv)
        except SystemExit as stop:
            return stop.code, stderr.getvalue()
    return "none", stderr.getvalue()


def started_anew(lines: list[list[str]], start: Callable[[list[str]], Said] = parse_line) -> list[Said]:
    """Start with each command line on this rank, as if it was the first."""
    from megatron.core.num_microbatches_calculator import destroy_num_microbatches_calculator
    from megatron.training.global_vars import destroy_global_vars

    from megatron.balanced.trainer import rendezvous

    warnings.simplefilter("ignore")  # Megatron-LM's, of other flags
    results = []
    for number, argv in enumerate(lines):
        rendezvous._start[:] = [str(number)]
        results.append(start(argv))
        destroy_global_vars()
        destroy_num_microbatches_calculator()
    return results


def parsed(pool: Any, lines: Sequence[list[str]]) -> list[tuple[Said, Said]]:
    """What both ranks say of each command line."""
    return list(zip(*pool.run(2, started_anew, list(lines)), strict=True))


def assert_accepted(pool: Any, base: list[str], lines: Sequence[str]) -> None:
    """base: what each command line begins with."""
    for flags, said in zip(lines, parsed(pool, [[*base, *flags.split()] for flags in lines]), strict=True):
        assert [code for code, _ in said] == ["none", "none"], (flags, said)


def assert_refused(pool: Any, base: list[str], cases: Mapping[str, Sequence[Any]]) -> None:
    """base: what each command line begins with. cases: its other flags, as they are typed or as a list, and the words
    that the line must have, by what is wrong with them. A dry run refuses each in the same words."""
    lines = [[*base, *(flags.split() if isinstance(flags, str) else flags)] for flags, *_ in cases.values()]
    wrong = {}
    dry = [[*line, "--balance-dry-run"] for line in lines]
    for case, said in zip([*cases] * 2, parsed(pool, lines + dry), strict=True):
        text = "".join(text for _, text in said)
        is_refused = [code for code, _ in said] == [2, 2] and text.count("\n") == 1
        if not is_refused or not all(word in text for word in ("pretrain_gpt.py: error: ", *cases[case][1:])):
            wrong[case] = said
    assert not wrong, wrong

"""The tests that docs/support.md names for what it claims, and a check that a whole run of the tests has run them."""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.mutants import node_id

__all__ = ["SUPPORT", "Claim", "claims", "not_run", "watch"]

SUPPORT = Path(__file__).resolve().parents[2] / "docs" / "support.md"
_NAMED = re.compile(r"`(test_[^`]+)`(?: \(needs (?:no )?([^)]+)\))?")


class Claim(NamedTuple):
    """A test, `name` or `name[case]`, and a word of the reason for which it may be skipped; empty if it may not."""

    test: str
    may_skip: str

    def covers(self, node: str) -> bool:
        """Whether the pytest node is this test or one of its cases."""
        function, bracket, case = node.partition("::")[2].partition("[")
        name = function.rpartition("::")[2]
        return self.test in (name, f"{name}{bracket}{case}")


def claims(text: str | None = None) -> list[Claim]:
    """What the page names, by row."""
    return [Claim(*found) for found in _NAMED.findall(SUPPORT.read_text() if text is None else text)]


def not_run(named: Iterable[Claim], ran: set[str], skipped: Mapping[str, str], left_out: set[str]) -> list[str]:
    """A line for each claim whose test has not run.

    ran, left_out: pytest nodes, the latter for --exhaustive. skipped: node or file -> why.
    """
    lines = []
    for claim in named:
        if any(claim.covers(node) for node in ran | left_out):
            continue
        file = node_id(claim.test).partition("::")[0]
        reasons = [why for node, why in skipped.items() if node == file or claim.covers(node)]
        if not reasons:
            lines.append(f"{claim.test} was not run")
        elif not claim.may_skip or not all(claim.may_skip.lower() in why.lower() for why in reasons):
            lines.append(f"{claim.test} was skipped: {reasons[0]}")
    return lines


class _Watch:
    """A plugin of pytest that makes a run fail that has passed without a test that the page names."""

    def __init__(self) -> None:
        self._ran: set[str] = set()
        self._skipped: dict[str, str] = {}
        self._left_out: set[str] = set()
        self._lines: list[str] = []

    def pytest_deselected(self, items: list[pytest.Item]) -> None:
        self._left_out |= {item.nodeid for item in items}

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.skipped:
            self._skipped[report.nodeid] = str(report.longrepr)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.skipped:
            self._skipped[report.nodeid] = str(report.longrepr)
        elif report.when == "call":
            self._ran.add(report.nodeid)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: object) -> None:
        """Workers of pytest-xdist report every test here but those that they left out."""
        self._left_out |= set(getattr(node, "workeroutput", {}).get("left_out", ()))

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput["left_out"] = sorted(self._left_out)
        elif exitstatus == pytest.ExitCode.OK:
            self._lines = not_run(claims(), self._ran, self._skipped, self._left_out)
            if self._lines:
                session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for line in self._lines:
            terminalreporter.write_line(f"docs/support.md claims what was not tested: {line}", red=True)


def watch(config: pytest.Config) -> None:
    """Check the claims at the end of this run, if it is one of all tests. What its flags leave out counts as run."""
    options = config.option
    whole = config.args_source is pytest.Config.ArgsSource.TESTPATHS and not (options.ignore or options.collectonly)
    if whole or hasattr(config, "workerinput"):
        config.pluginmanager.register(_Watch())

"""The pytest plugin: the marker of law tests, the option that chooses a profile, and the count at the end of a run."""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

import pytest

PROPERTY = "kvframe_law"
PROFILE = "KVFRAME_PROFILE"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--kvframe-profile`."""
    group = parser.getgroup("kvframe", "kvframe's laws of stages and specs")
    group.addoption(
        "--kvframe-profile",
        choices=("dev", "ci", "deep"),
        help="cases drawn for each law: dev 8, ci 20 (the default), deep 400 new ones at every run",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker; hand the profile on to the laws, in this process and in xdist's workers."""
    config.addinivalue_line("markers", f"{PROPERTY}(kind, subject, law): a law held against a stage or a spec")
    if profile := config.getoption("--kvframe-profile"):
        os.environ[PROFILE] = profile
    config.pluginmanager.register(_Count(), "kvframe-count")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Note on each law test what it checks: properties travel from xdist's workers to the terminal, markers do not."""
    for item in items:
        if (mark := item.get_closest_marker(PROPERTY)) is not None:
            item.user_properties.append((PROPERTY, "|".join(map(str, mark.args))))


class _Count:
    """Counts laws, stages and specs, and prints them."""

    def __init__(self) -> None:
        self.checks: dict[tuple[str, ...], str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note one outcome."""
        for name, value in report.user_properties:
            if name == PROPERTY and (report.when == "call" or report.failed):
                outcome = "expected to fail" if hasattr(report, "wasxfail") else report.outcome
                self.checks[tuple(str(value).split("|"))] = outcome

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Print the counts, if a law was run."""
        if not self.checks:
            return
        laws = {(kind, law) for kind, _, law in self.checks}
        subjects = Counter(
            kind == "pipeline" for kind, _ in {(k, subject) for k, subject, _ in self.checks if k != "stage"}
        )
        names = {subject.partition("(")[0] for kind, subject, _ in self.checks if kind != "pipeline"}
        outcomes = ", ".join(f"{n} {outcome}" for outcome, n in sorted(Counter(self.checks.values()).items()))
        terminalreporter.section("kvframe laws")
        terminalreporter.write_line(
            f"{len(laws)} laws on {len(names)} stages ({subjects[False]} with their parameter choices) and "
            f"{subjects[True]} specs: {outcomes}"
        )

"""Counts in the summary: how many tests of each kind of proof were run."""

from __future__ import annotations

from collections import Counter

import pytest

_KINDS = {
    "interpreter": "interpreter",
    "compiled": "compiled for GPUs",
    "property": "property",
    "bit_equal": "bit-equality",
    "family": "family",
    "mooncake": "real Mooncake",
    "model": "real weights",
}
_passed = pytest.StashKey[Counter[str]]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_passed] = Counter()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]):  # type: ignore[no-untyped-def]
    report = yield
    if report.when == "call" and report.passed:
        item.config.stash[_passed].update(kind for kind in _KINDS if item.get_closest_marker(kind) is not None)
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    passed = config.stash[_passed]
    if passed:
        counts = ", ".join(f"{passed[kind]} {name}" for kind, name in _KINDS.items() if passed[kind])
        terminalreporter.write_line(f"passed by kind: {counts}")

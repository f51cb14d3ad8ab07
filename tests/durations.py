"""How long each test takes: seconds, and processor seconds of the test process and all processes below it.

A plugin that conftest.py registers. Every run adds its tests to artifacts/durations.json, as node id -> {"seconds",
"processor"}, and a run of many tests ends with the slowest. `--slowest-test=2` fails a run in which a test took more
processor seconds.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

MANY, SHOWN = 100, 30  # tests from which the slowest are shown, and how many
_TICKS = os.sysconf("SC_CLK_TCK")
_START = pytest.StashKey[tuple[float, float]]()


def processor_seconds() -> float:
    """Return what this process, those it has waited for, and those that live below it have used so far (Linux)."""
    used = os.times()
    return used.user + used.system + used.children_user + used.children_system + _below(os.getpid())


def _below(pid: int) -> float:
    seconds = 0.0
    try:
        for task in os.listdir(f"/proc/{pid}/task"):
            for child in Path(f"/proc/{pid}/task/{task}/children").read_text().split():
                fields = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()
                seconds += sum(map(int, fields[11:15])) / _TICKS + _below(int(child))
    except OSError:  # A process has ended since: its parent has its seconds, or nobody has.
        return seconds
    return seconds


class Durations:
    """Measures the tests of this process, and in the main process writes down those of all."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._tests: dict[str, dict[str, Any]] = {}

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Any:
        item.stash[_START] = time.monotonic(), processor_seconds()
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[Any]) -> Any:
        report = yield
        if call.when == "teardown":
            began, used = item.stash[_START]
            figures = {"seconds": time.monotonic() - began, "processor": processor_seconds() - used}
            report.user_properties.append(("durations", {name: round(value, 3) for name, value in figures.items()}))
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        for name, figures in report.user_properties:
            if name == "durations":
                self._tests[report.nodeid] = figures

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if not self._tests or hasattr(self._config, "workerinput"):
            return
        limit = self._config.getoption("slowest_test")
        if limit and any(figures["processor"] > limit for figures in self._tests.values()):
            session.exitstatus = session.exitstatus or pytest.ExitCode.TESTS_FAILED
        path = self._config.rootpath / "artifacts" / "durations.json"
        path.parent.mkdir(exist_ok=True)
        before = json.loads(path.read_text()) if path.exists() else {}
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            json.dump(before | self._tests, file, indent=1)
        os.replace(file.name, path)  # Several runs may end at the same moment.

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        slowest = sorted(self._tests.items(), key=lambda test: -test[1]["processor"])
        limit = self._config.getoption("slowest_test")
        shown = slowest[:SHOWN] if len(slowest) >= MANY else []
        if limit and (beyond := [test for test in slowest if test[1]["processor"] > limit]):
            terminalreporter.section(f"FAILED: tests of more than {limit:g} processor seconds")
            shown = beyond
        elif shown:
            total = sum(figures["processor"] for _, figures in slowest)
            terminalreporter.section(f"slowest {len(shown)} of {len(slowest)} tests ({total:.0f} processor seconds)")
        for nodeid, figures in shown:
            terminalreporter.write_line(f"{figures['processor']:7.2f} s  ({figures['seconds']:.2f} s)  {nodeid}")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slowest-test", type=float, default=0.0, help="the most processor seconds that a test may take")

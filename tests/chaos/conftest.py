"""`make chaos` ends with a table of what was done to trainings, and what became of them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from chaos.table import table

FIGURES = os.environ.get("CHAOS_FIGURES", "")


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Where there are figures."""
    if FIGURES and Path(FIGURES).exists():
        terminalreporter.section("random faults: seconds until they were seen, or the call was over")
        for row in table(Path(FIGURES).read_text().splitlines()):
            terminalreporter.write_line(row)

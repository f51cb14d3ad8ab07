"""The table at the end of `make chaos`: the faults done to trainings, and their outcomes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from chaos.table import table

FIGURES = os.environ.get("CHAOS_FIGURES", "")


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print the table where there are figures."""
    if FIGURES and Path(FIGURES).exists():
        terminalreporter.section("random faults: seconds until they were seen, or the call was over")
        for row in table(Path(FIGURES).read_text().splitlines()):
            terminalreporter.write_line(row)

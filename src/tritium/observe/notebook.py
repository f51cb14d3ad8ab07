"""A run in the output of a notebook's cell, which changes while the run goes on (driver)."""

from __future__ import annotations

import html
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tritium.observe.page import tag

if TYPE_CHECKING:
    from tritium.observe.position import RunState

REFRESH_SECONDS = 0.5


def in_kernel() -> bool:
    """Return whether this process is the kernel of a notebook, whose cells can show HTML and replace it."""
    ipython: Any = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return shell is not None and hasattr(shell, "kernel")


class NotebookView:
    """HTML in the output of the present cell. `refresh` may be called from any thread, one at a time.

    render : returns the HTML as it is now.
    """

    def __init__(self, render: Callable[[], str]) -> None:
        from IPython import display as untyped

        self._render, self._shown = render, render()
        self._ipython: Any = untyped
        self._handle: Any = self._ipython.display(self._ipython.HTML(self._shown), display_id=True)

    def refresh(self) -> None:
        """Show the present HTML in the place of the former."""
        now = self._render()
        if now != self._shown:
            self._shown = now
            self._handle.update(self._ipython.HTML(now))


def status(run: RunState) -> str:
    """Return the first lines of a run as HTML: what it does, a bar where its length is known, its numbers."""
    head = f"<p><b>{html.escape(run.name)}</b> {run.elapsed} &ensp; {html.escape(run.status)}</p>"
    share, numbers = run.fraction, run.steps or run.spooled
    bar = "" if share is None else tag("progress", max="1", value=f"{share:.4f}", style="width: 20em") + " "
    return head + (f"<p>{bar}{html.escape(numbers)}</p>" if numbers else "")

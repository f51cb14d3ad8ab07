"""A display that is drawn again while a run goes on: on a terminal by rich, in a notebook as HTML (driver)."""

from __future__ import annotations

import importlib.util
import sys
import threading
from collections.abc import Callable
from typing import IO, TYPE_CHECKING

from tritium.observe.position import RunState

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

REFRESH_SECONDS = 0.25
terminal = threading.Lock()  # The one live display of this process holds it, and other runs write plain lines.


class LiveDisplay:
    """A display, with the thread that draws it. `close` ends both, and lets another run have one.

    seconds : between two times that it is drawn.
    refresh : draws it. stop : draws it for the last time.
    console : rich's, which writes lines above it; None: they are written as any others.
    """

    def __init__(
        self,
        seconds: float,
        refresh: Callable[[], object],
        stop: Callable[[], object],
        console: Console | None = None,
    ) -> None:
        self._seconds, self._refresh, self._stop = seconds, refresh, stop
        self._console = console
        self._closed = threading.Event()
        self.broken = False
        """Whether the terminal is gone."""
        self._ticker = threading.Thread(target=self._tick, name="tritium-progress", daemon=True)
        self._ticker.start()

    def write(self, line: str) -> bool:
        """Write a line above the display, and return whether that was done. Raises OSError, ValueError."""
        if self._console is None:
            return False
        from rich.text import Text

        self._console.print(Text.from_ansi(line), soft_wrap=True, highlight=False)
        return True

    def stop_drawing(self) -> None:
        """End the thread; lines can still be written."""
        self._closed.set()
        self._ticker.join()

    def close(self) -> None:
        """Draw the display for the last time."""
        try:
            self._stop()
        except (OSError, ValueError):
            self.broken = True
        finally:
            terminal.release()

    def _tick(self) -> None:
        while not self._closed.wait(self._seconds):
            try:
                self._refresh()
            except (OSError, ValueError):
                self.broken = True
                return


def started(
    state: Callable[[], RunState], details: Callable[[], str], forced: bool | None, stream: IO[str] | None
) -> LiveDisplay | None:
    """Start a display, and return it; None where there can be none, or another run has it.

    details : returns HTML that a notebook shows below the bar.
    forced  : True: also where no terminal is seen.
    stream  : the stream to write to; None: `sys.stdout`.

    Raises OSError or ValueError where the terminal is gone.
    """
    if forced is None and stream is None and "IPython" in sys.modules:
        from tritium.observe import notebook

        if notebook.in_kernel():
            if not terminal.acquire(blocking=False):
                return None
            view = notebook.NotebookView(lambda: notebook.status(state()) + details())
            return LiveDisplay(notebook.REFRESH_SECONDS, view.refresh, view.refresh)
    from rich.console import Console
    from rich.live import Live

    console = Console(file=stream, force_terminal=True if forced and stream else None)
    if not (forced or can_be_live(console)) or not terminal.acquire(blocking=False):
        return None
    live = Live(console=console, auto_refresh=False, get_renderable=lambda: _rendered(state()))
    try:
        live.start(refresh=True)
    except (OSError, ValueError):
        terminal.release()
        raise
    return LiveDisplay(REFRESH_SECONDS, live.refresh, live.stop, console)


def _rendered(run: RunState) -> RenderableType:
    from rich.console import Group
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    head = Text.assemble((f"{run.name} ", "bold"), run.elapsed, "  ", run.status)
    if not run.steps:
        return Group(head, Text(run.spooled)) if run.spooled else head
    if run.fraction is None:
        return Group(head, Text(run.steps))
    table = Table.grid(padding=(0, 2))
    table.add_column(width=20)
    table.add_row(ProgressBar(total=1.0, completed=run.fraction), Text(run.steps))
    return Group(head, table, Text(f"loss {run.losses}")) if run.losses else Group(head, table)


def can_be_live(console: Console) -> bool:
    """Return whether rich can draw on this console, and take back what it has drawn."""
    if console.is_jupyter:
        return importlib.util.find_spec("ipywidgets") is not None
    return console.is_terminal and not console.is_dumb_terminal

"""In Jupyter a run shows a bar, the curve of its loss and a row for each rank, and they change while it goes on."""

from __future__ import annotations

import re
import signal
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

CELL = """
import threading
import tritium as tr

def train():
    world = tr.world()
    for step in range(8):
        threading.Event().wait(0.2)
        world.log(step=step, steps=8, loss=1.0 / (1 + step))
    print("trained")

tr.launch(train, ranks=2, on="driver")
"""


class Watching(NotebookClient):  # type: ignore[misc]
    """Keeps every HTML that a cell has shown, in order."""

    def process_message(self, message: dict[str, Any], cell: Any, index: int) -> Any:
        data = message["content"].get("data", {})
        if message["msg_type"] in ("display_data", "update_display_data") and "text/html" in data:
            self.__dict__.setdefault("pages", []).append(data["text/html"])
        return super().process_message(message, cell, index)


def test_a_run_is_seen_while_it_goes_on(tmp_path: Path) -> None:
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(CELL)])
    client = Watching(notebook, timeout=120, resources={"metadata": {"path": str(tmp_path)}})
    handler = signal.getsignal(signal.SIGINT)
    try:
        client.execute()
    finally:
        signal.signal(signal.SIGINT, handler)  # The client leaves Python's own.
    pages: list[str] = client.__dict__["pages"]
    shares = [float(share) for page in pages for share in re.findall(r"<progress max='1' value='([\d.]+)'", page)]
    assert shares == sorted(shares)
    assert len({share for share in shares if share < 1}) >= 2, shares
    assert shares[-1] == 1
    outputs = notebook.cells[0].outputs
    (shown,) = (output for output in outputs if output.output_type == "display_data")  # One place, which changes.
    final = shown.data["text/html"]
    assert "done after" in final
    assert "step 8/8" in final
    assert "<svg" in final
    assert ">loss</text>" in final
    assert re.findall(r"<tr><td>(\d)</td>", final) == ["0", "1"]
    text = "".join(output.text for output in outputs if output.output_type == "stream")
    assert {"[rank 0] trained", "[rank 1] trained"} <= set(text.splitlines())
    assert "spooled" not in text  # What the display shows is in no line.

"""Take the picture of docs/tasks/watch.md: a training whose rank 1 was killed once, on the page of `tritium ui`.

python scripts/ui_picture.py
"""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import threading
from pathlib import Path

import numpy as np
import pandas as pd
import torch

from tritium.events import CheckpointSaved, Event, GangFormed
from tritium.gang.driver.told import told
from tritium.ml import fit
from tritium.observe.stream import listen
from tritium.ui.server import page

PICTURE = Path(__file__).resolve().parents[1] / "docs" / "tasks" / "watch.png"


def train(run_dir: str) -> None:
    """Train on two ranks, of which one is killed after the first checkpoint."""
    table = pd.DataFrame({"x": np.random.default_rng(0).normal(size=40_000)})
    table["y"] = np.sin(table["x"])
    pids: list[int] = []

    def on_event(event: Event) -> None:
        if isinstance(event, GangFormed):
            pids.append(int(event.peers[1]["pid"]))
        elif isinstance(event, CheckpointSaved) and len(pids) == 1:
            os.kill(pids[0], signal.SIGKILL)
            pids.append(0)  # The next gang is left alone.

    with listen(on_event):
        fit(
            table,
            model=lambda: torch.nn.Sequential(torch.nn.Linear(1, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1)),
            loss=torch.nn.MSELoss(),
            optimizer=torch.optim.Adam,
            feature_cols=["x"],
            label_cols=["y"],
            epochs=8,
            validation=0.2,
            ranks=2,
            on="driver",
            trace=True,
            run_dir=run_dir,
            checkpoint_every="1s",
        )


def take(run_dir: str) -> None:
    """Write PICTURE."""
    from playwright.sync_api import sync_playwright

    served = page([run_dir], told)
    thread = threading.Thread(target=served.serve)
    thread.start()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        tab = browser.new_page(viewport={"width": 1100, "height": 900})
        tab.goto(served.url)
        tab.click("#runs tbody a")
        tab.wait_for_selector("figure canvas")
        tab.screenshot(path=PICTURE)
        browser.close()
    served.server.should_exit = True
    thread.join()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        train(f"{folder}/sine")
        take(f"{folder}/sine")

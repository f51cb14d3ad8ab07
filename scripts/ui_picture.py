"""Take the pictures of docs/tasks/watch.md, of the page of `tritium ui`: a training and a streaming query that scores.

Rank 1 of the training is killed once. The query takes a second version of its model.

python scripts/ui_picture.py
"""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

import tritium as tr
from tritium.events import CheckpointSaved, Event, GangFormed, MicroBatchScored
from tritium.gang.driver.told import told
from tritium.ml import fit
from tritium.observe.stream import listen
from tritium.ui.server import page

PICTURES = Path(__file__).resolve().parents[1] / "docs" / "tasks"


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


@contextmanager
def scoring(run_dir: str) -> Iterator[None]:
    """Score a stream until the block ends, which begins after 60 micro-batches and a second version of the model."""
    spark = SparkSession.builder.master("local[2]").getOrCreate()
    x = F.when(F.col("value") % 97 > 0, F.sin("value"))  # One in 97 is null.
    events = spark.readStream.format("rate").option("rowsPerSecond", 300).load().select(x.alias("x"))
    model = tr.Model(torch.nn.Linear(1, 1), example=pd.DataFrame({"x": [0.5]}))
    tr.publish(model, f"{run_dir}-models")
    follower = model.follow(f"{run_dir}-models", every="2s", trusted=True)
    done = threading.Event()

    def on_event(event: Event) -> None:
        if isinstance(event, MicroBatchScored) and event.batch == 30:
            tr.publish(model, f"{run_dir}-models")
        elif isinstance(event, MicroBatchScored) and event.batch == 60:
            done.set()

    with listen(on_event):
        scored = follower.setParams(run_dir=run_dir, on_error="null").transform(events)
        query = scored.writeStream.format("noop").trigger(processingTime="1 second").start()
        done.wait()
    yield
    query.stop()
    follower.stop_following()


def take(run_dir: str, name: str) -> None:
    """Write a picture of the run's page."""
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
        tab.screenshot(path=PICTURES / name)
        browser.close()
    served.server.should_exit = True
    thread.join()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        train(f"{folder}/sine")
        take(f"{folder}/sine", "watch.png")
        with scoring(f"{folder}/query"):
            take(f"{folder}/query", "query.png")

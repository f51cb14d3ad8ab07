"""Programs that the tests of checkpoints and full disks run as processes: `python saving.py NAME ARGUMENTS`."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import sys
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

import tritium as tr
from tritium.checkpoint.format import Loaded
from tritium.checkpoint.store import Store
from tritium.errors import CheckpointFailed, SpoolFull, StoreFailed
from tritium.gang.driver.launch import start

QUIET = {"progress": False, "output": "none"}


def state_at(step: int, size: int = 30_000) -> dict[str, Any]:
    """Return the state saved at a step, which is a function of the step."""
    return {"weight": np.full(size, step, np.float32), "rows": np.arange(step % 7), "history": [step] * 3}


def check(loaded: Loaded) -> None:
    """Assert that the state is the one that was saved."""
    wanted = state_at(loaded.step, len(loaded["weight"]))
    assert loaded["history"] == wanted["history"], loaded.step
    assert all(np.array_equal(loaded[name], wanted[name]) for name in ("weight", "rows")), loaded.step
    assert [mine["step"] for mine in loaded.own] == [loaded.step] * loaded.size


def save(steps: int, every: int = 1, size: int = 30_000, said: int | None = None) -> int:
    """Continue from the newest checkpoint for `steps` steps in a rank; write each complete one to descriptor `said`."""
    checkpoint = tr.world().checkpoint
    found = checkpoint.load()
    if found is not None:
        check(found)
    start = 0 if found is None else found.step
    for step in range(start + 1, start + steps + 1):
        checkpoint.save(state_at(step, size), step, own={"step": step}, every=every)
        if said is not None:
            checkpoint.wait()
            os.write(said, b"%d\n" % step)
    return start


def kill(folder: str, rounds: str, seed: str) -> None:
    """Kill a process that saves in a loop, at random moments, again and again; check the disk after each."""
    chance = random.Random(int(seed))
    saved, partial, passed = 0, 0, 0
    for _ in range(int(rounds)):
        ours, theirs = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(ours)
            with contextlib.suppress(BaseException):
                tr.launch(save, args=(10_000,), kwargs={"said": theirs}, run_dir=folder, on="here", **QUIET)
            os._exit(1)
        os.close(theirs)
        with os.fdopen(ours, "rb") as told:
            begun = told.readline() if saved == 0 or chance.random() < 0.5 else b""  # else also while it loads
            time.sleep(chance.random() * 0.06)
            os.kill(child, signal.SIGKILL)
            lines = (begun + told.read()).split(b"\n")[:-1]
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        last = int(lines[-1]) if lines else saved
        store = Store(folder)
        loaded, reasons = store.newest()
        assert loaded is not None
        assert last <= loaded.step <= last + 1, (last, loaded.step)
        check(loaded)
        partial += bool(reasons)
        for name in store.names():  # a kill damages nothing that was complete
            check(store.load(name))
            passed += 1
        assert len(store.names()) >= min(2, loaded.step)
        saved = loaded.step
    print(json.dumps({"saved": saved, "partial": partial, "checked": passed}))


def full(folder: str) -> None:
    """Save, on a disk of 2.5 MB, a third checkpoint of 0.8 MB, which does not fit beside the two before."""
    facts: dict[str, Any] = {}
    size = 200_000
    tr.launch(save, ranks=2, args=(2,), kwargs={"size": size}, run_dir=folder, on="driver", **QUIET)
    with open(f"{folder}/ballast", "wb") as file:
        file.write(bytes(300_000))
    try:
        tr.launch(save, ranks=2, args=(2,), kwargs={"size": size}, run_dir=folder, on="driver", **QUIET)
    except CheckpointFailed as error:
        facts = {"text": str(error), **{name: getattr(error, name) for name in ("path", "needed", "written", "free")}}
    store = Store(folder)
    for name in store.names():
        check(store.load(name))
    facts["there"] = sorted(os.listdir(f"{folder}/checkpoints"))
    os.system(f"mount -o remount,ro {folder}")
    try:
        Store(folder).prepare(9)
    except CheckpointFailed as error:
        facts["read-only"] = str(error)
    print(json.dumps(facts))


def full_spool(folder: str) -> None:
    """Spool, on a disk of 4 MB, too many rows, and then few enough."""
    facts: dict[str, Any] = {}
    empty = shutil.disk_usage(folder).free

    def rows() -> int:
        return sum(batch.rows for epoch in tr.world().shard("train").epochs(1, batch_size=1024) for batch in epoch)

    def run(count: int, shuffle: str, name: str) -> list[int]:
        table = pa.table({f"x{column}": np.arange(count, dtype=np.float64) for column in range(8)})
        data = {"train": tr.Data(table, shuffle=shuffle)}
        return tr.launch(rows, ranks=2, on="driver", data=data, run_dir=os.environ["RUNS"] + name, **QUIET)

    for shuffle in ("full", "stream"):
        try:
            run(100_000, shuffle, shuffle)
        except SpoolFull as error:
            facts[shuffle] = {"text": str(error)}
            facts[shuffle] |= {name: getattr(error, name) for name in ("directory", "written", "needed", "free")}
            facts[shuffle]["left"] = [empty - shutil.disk_usage(folder).free, os.listdir(folder)]
    facts["after"] = run(1_000, "full", "after")
    print(json.dumps(facts))


def full_run_dir(folder: str) -> None:
    """Store, on a disk of 4 MB with the run directory, a file that fits, one that does not, and then a log."""
    facts: dict[str, Any] = {}

    def stores(megabytes: int) -> int:
        world = tr.world()
        if world.rank == 1:
            world.store("weights.bin", (bytes(1 << 20) for _ in range(megabytes)))
        return world.rank

    def logs() -> int:
        for number in range(20_000):
            tr.world().log(step=number, loss=1 / (number + 1))
        return 7

    tr.launch(stores, ranks=2, on="driver", args=(1,), run_dir=folder, **QUIET)
    try:
        tr.launch(stores, ranks=2, on="driver", args=(8,), run_dir=folder, **QUIET)
    except StoreFailed as error:
        facts["error"] = {"text": str(error), "rank": error.rank, "type": type(error).__name__}
        facts["error"] |= {name: getattr(error, name) for name in ("path", "written", "needed", "free")}
    facts["left"] = {path.name: path.stat().st_size for path in Path(folder).rglob("weights*")}
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        facts["logged"] = tr.launch(logs, ranks=2, on="driver", run_dir=folder, **QUIET)
    facts["said"] = [str(warning.message) for warning in said]
    print(json.dumps(facts))


def object_store_run(url: str) -> None:
    """Kill a rank while it stores a file on a server without rename; the next attempt stores it again."""
    import fsspec

    def stores() -> None:
        def chunks() -> Any:
            for number in range(8):
                if number == 7 and found is None:
                    tr.world().checkpoint.save({}, 1)
                    tr.world().checkpoint.wait()
                    time.sleep(0.5)
                    os.kill(os.getpid(), signal.SIGKILL)
                yield b"%d" % number * (1 << 20)

        found = tr.world().checkpoint.load()
        tr.world().store("weights.bin", chunks())

    report = start(stores, tr.Gang(ranks=1, run_dir=url, on="driver", **{**QUIET, "retries": 1})).report
    files, root = fsspec.core.url_to_fs(url)
    whole = b"".join(b"%d" % number * (1 << 20) for number in range(8))
    files.invalidate_cache()
    facts = {"retries": len(report["retries"]), "whole": files.cat_file(f"{root}/weights.bin") == whole}
    print(json.dumps({**facts, "left": [name for name in files.find(root) if "part" in name]}))


def object_store(url: str) -> None:
    """Let two ranks save to and load from a server without rename."""
    import fsspec

    facts: dict[str, Any] = {}
    notes: list[list[str]] = []

    def run(steps: int) -> Any:
        run = start(save, tr.Gang(ranks=2, run_dir=url, on="driver", **QUIET), args=(steps,))
        notes.append(run.report["notes"])
        return run.result()

    facts["first"] = run(3)
    store = Store(url)
    facts["names"] = store.names()
    files, root = fsspec.core.url_to_fs(url)
    newest = f"{root}/checkpoints/{facts['names'][0]}"
    files.pipe_file(f"{newest}/own-1.safetensors", files.cat_file(f"{newest}/own-1.safetensors")[:-2])
    facts["second"] = run(2)
    newest = f"{root}/checkpoints/{Store(url).names()[0]}"
    files.rm(f"{newest}/manifest.json")
    facts["third"] = run(1)
    facts["left"] = sorted(Store(url)._directories())
    facts["notes"] = notes
    files.rm(f"{root}/run.json")
    loaded, _ = Store(url).newest()
    assert isinstance(loaded, Mapping)
    facts["last"] = loaded.step
    facts["fitted"] = [fitted(f"{url}/fit", features) for features in (1, 900)]
    print(json.dumps(facts))


def fitted(url: str, features: int) -> int:
    """Fit with a run directory on the server, and list it afterwards, as users do. Returns the number of weights."""
    import fsspec
    import pandas as pd
    import torch

    from tritium.ml import TorchEstimator

    rows = pd.DataFrame({f"x{i}": [0.0, 1.0] for i in range(features)} | {"y": [0.0, 1.0]})
    estimator = TorchEstimator(
        model=lambda: torch.nn.Linear(features, 1),
        loss=torch.nn.MSELoss(),
        optimizer=torch.optim.Adam,
        feature_cols=[name for name in rows if name != "y"],
        label_cols=["y"],
        batch_size=2,
        epochs=1,
        checkpoint_every=None,
        run_dir=url,
        on="here",
        verbose=False,
        **QUIET,
    )
    model = estimator.fit(rows)
    files, root = fsspec.core.url_to_fs(url)
    files.find(root)
    return sum(weights.numel() for weights in model.module().parameters())


if __name__ == "__main__":
    programs = {"full_run_dir": full_run_dir, "object_store_run": object_store_run}
    {**programs, "kill": kill, "full": full, "full_spool": full_spool, "object_store": object_store}[sys.argv[1]](
        *sys.argv[2:]
    )

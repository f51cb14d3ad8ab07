"""The trainings that are disturbed, and the driver process that calls them: `python training.py KIND MASTER FD`.

It keeps one Spark session, reads requests as lines of JSON from its standard input, and answers on the pipe FD. Some
requests are obeyed at once, while a training continues: what is done to its control connections.
"""

from __future__ import annotations

import contextlib
import faulthandler
import hashlib
import json
import os
import queue
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # what ranks get is taken along by value: they can't import what lies here
    sys.path[:0] = [str(Path(__file__).parents[1])]

import numpy as np
import torch
from torch import nn

import tritium as tr
from tritium.ml import Callback, EarlyStopping, TorchEstimator

RANKS = 2
EPOCHS = 3
ROWS = 240
STEP_SECONDS = 0.02  # a step takes at least so long, so that there are moments to hit
MARKS = "CHAOS_MARKS"  # where a rank writes what it has reached: "step", "validation", "epoch", "trained", "returning"
STALL_SECONDS = 15.0
START_SECONDS = 60.0


def mark(what: str) -> None:
    """Write a mark from a rank, in one short line, for the observing process."""
    if path := os.environ.get(MARKS):
        with open(path, "a", encoding="utf-8") as file:
            file.write(f"{what}\n")


class Net(nn.Module):
    """A small net with dropout, or with BatchNorm; in a rank every call takes a while and is marked."""

    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        between = nn.BatchNorm1d(16) if norm else nn.Dropout(0.2)
        self.layers = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), between, nn.Linear(16, 1))

    def forward(self, x: torch.Tensor) -> Any:
        if MARKS in os.environ:
            mark("step" if self.training else "validation")
            time.sleep(STEP_SECONDS)
        return self.layers(x)


class Marks(Callback):
    """A callback that marks the end of epochs and of the training."""

    def on_epoch_end(self, state: Any) -> None:
        mark("epoch")

    def on_train_end(self, state: Any) -> None:
        mark("trained")


def distance(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    """Compute the mean absolute error, a metric that is a function."""
    return (output - label).abs().mean()


def frame(spark: Any) -> Any:
    """Return rows that Spark recomputes in the same way, whatever it has lost."""
    rows = spark.range(0, ROWS, 1, 2)
    return rows.selectExpr("id", "sin(id) as a", "cos(3 * id) as b", "id / 240 as c", "2 * sin(id) - cos(id) as y")


def slowly(spark: Any) -> Any:
    """Return the same rows through a slow Python function."""

    def slow(batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            time.sleep(0.3)
            yield batch

    rows = frame(spark)
    return rows.mapInArrow(slow, rows.schema)


def estimator(**settings: Any) -> TorchEstimator:
    """Return an estimator with the settings common to all trainings."""
    common: dict[str, Any] = {
        "loss": nn.MSELoss(),
        "feature_cols": ["a", "b", "c"],
        "label_cols": ["y"],
        "batch_size": 8,
        "epochs": EPOCHS,
        "seed": 3,
        "shuffle": "full",
        "checkpoint_every": 2,
        "callbacks": [Marks()],
    }
    return TorchEstimator(**common | settings)


def with_dropout(**gang: Any) -> TorchEstimator:
    return estimator(
        model=Net,
        optimizer=lambda p: torch.optim.Adam(p, 3e-3),
        lr_scheduler=lambda optimizer, steps: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, total_steps=steps),
        gradient_accumulation=2,
        clip_grad_norm=1.0,
        metrics=[distance],
        validation=0.2,
        **gang,
    )


def with_norm(**gang: Any) -> TorchEstimator:
    return estimator(
        model=partial(Net, norm=True),
        optimizer=lambda p: torch.optim.AdamW(p, 1e-2, weight_decay=0.1),
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9),
        early_stopping=EarlyStopping(patience=2),
        metrics={"distance": distance, "square": nn.functional.mse_loss},
        validation=0.25,
        remainder="drop",
        **gang,
    )


def without_checkpoints(**gang: Any) -> TorchEstimator:
    return estimator(
        model=Net,
        optimizer=lambda p: torch.optim.SGD(p, 0.05, momentum=0.9),
        lr_scheduler=lambda optimizer, steps: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps),
        metrics=[distance],
        checkpoint_every=None,
        persist=True,
        **gang,
    )


def fitted(make: Callable[..., TorchEstimator], rows: Callable[[Any], Any], spark: Any, **gang: Any) -> dict[str, Any]:
    """Return weights and history of a trained model, without times: the same in every run."""
    model = make(**gang).fit(rows(spark)).model
    digest = hashlib.sha256()
    for name, value in model.module.state_dict().items():
        digest.update(name.encode() + value.numpy().tobytes())
    history = [{k: v for k, v in entry.items() if k not in ("seconds", "rows_per_second")} for entry in model.history]
    return {"weights": digest.hexdigest(), "history": history}


def descend() -> dict[str, Any]:
    """Run a user's function in a rank: gradient descent by `gather`, saved by `world.checkpoint`."""
    world = tr.world()
    weights, losses, step = np.zeros(3), [], 0
    saved = world.checkpoint.load()
    if saved is not None:
        weights, losses, step = saved["weights"], list(saved["losses"]), saved.step
    shard = world.shard("train")
    resume = None if saved is None else [own["position"] for own in saved.own]
    for epoch in shard.epochs(EPOCHS, batch_size=8, seed=7, resume=resume):
        for batch in epoch:
            mark("step")
            time.sleep(STEP_SECONDS)
            x, y = (np.array(batch[name][: batch.rows], np.float64) for name in ("x", "y"))
            wrong = x @ weights - y[:, 0]
            sums = world.gather((x.T @ wrong, float(wrong @ wrong)))
            weights = weights - 0.1 * np.sum([gradient for gradient, _ in sums], axis=0) / batch.total
            losses.append(sum(loss for _, loss in sums) / batch.total)
            step += 1
            state = {"weights": weights, "losses": list(losses)}
            world.checkpoint.save(state, step, own={"position": shard.state()}, every=3)
        mark("epoch")
    mark("trained")
    if world.rank == 0:
        world.store("weights.txt", [json.dumps(weights.tolist()).encode()])
    return {"weights": weights.tolist(), "losses": losses}


def launched(spark: Any, **gang: Any) -> dict[str, Any]:
    columns = {"x": ["a", "b", "c"], "y": ["y"]}
    data = {"train": tr.Data(frame(spark), columns=columns, shuffle="full")}
    one, other = tr.launch(descend, data=data, spark=spark, **gang)
    assert one == other, "both ranks have computed the same"
    stored = json.loads(Path(gang["run_dir"], "weights.txt").read_text())
    assert stored == one["weights"], f"what was stored, {stored}, are not the weights {one['weights']}"
    return dict(one)


TRAININGS: dict[str, Callable[..., dict[str, Any]]] = {
    "dropout": partial(fitted, with_dropout, frame),
    "batch norm": partial(fitted, with_norm, frame),
    "sharded": partial(fitted, partial(with_dropout, strategy="fsdp"), frame),
    "no checkpoints": partial(fitted, without_checkpoints, slowly),
    "function": launched,
}


def meet() -> list[int]:
    """Launch a small gang, to show that a session still works."""
    return tr.world().gather(tr.world().rank)


# ---- the driver process


class Driver:
    """A server of requests, one after the other, but for those that are obeyed at once."""

    def __init__(self, spark: Any, answers: int, proxies: list[Any]) -> None:
        self._spark = spark
        self._answers = answers
        self._proxies = proxies
        self._requests: queue.Queue[dict[str, Any] | None] = queue.Queue()

    def serve(self) -> None:
        """Serve until standard input is closed."""
        reader = threading.Thread(target=self._read, name="requests", daemon=True)
        reader.start()
        while (request := self._requests.get()) is not None:
            self.answer(getattr(self, "do_" + request.pop("do"))(**request))
        reader.join()

    def answer(self, value: Any) -> None:
        """Write one line of JSON."""
        data = json.dumps(value, default=str).encode() + b"\n"
        while data:
            data = data[os.write(self._answers, data) :]

    def _read(self) -> None:
        for line in sys.stdin:
            request = json.loads(line)
            if request["do"] == "connections":
                for proxy in list(self._proxies):
                    getattr(proxy, request["how"])(*request["arguments"])
            else:
                self._requests.put(request)
        self._requests.put(None)

    def do_train(self, training: str, run_dir: str, marks: str, retries: int) -> dict[str, Any]:
        """Train. Return the outcome, the warnings, and what was left behind in this process and below it."""
        import leaks

        gang: dict[str, Any] = {
            "ranks": RANKS,
            "run_dir": run_dir,
            "env": {MARKS: marks},
            "retries": retries,
            "stall_timeout": STALL_SECONDS,
            "start_timeout": START_SECONDS,
        }
        before = leaks.Trace.now(set())
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            outcome = self._outcome(lambda: TRAININGS[training](self._spark, **gang))
        for proxy in self._proxies:
            proxy.close()
        self._proxies.clear()
        outcome["warnings"] = [str(warning.message) for warning in caught]
        outcome["left"] = before.left(set())
        return outcome

    def do_meet(self) -> dict[str, Any]:
        """Run a small launch and a small query, to show that the session still works."""
        return self._outcome(
            lambda: [tr.launch(meet, ranks=RANKS, spark=self._spark, start_timeout=60.0), self._spark.range(10).count()]
        )

    def _outcome(self, do: Callable[[], Any]) -> dict[str, Any]:
        began = time.monotonic()
        try:
            return {"value": do(), "error": None, "seconds": time.monotonic() - began}
        except Exception as error:  # noqa: BLE001 - told to whoever asked
            kinds = [kind.__name__ for kind in type(error).__mro__]
            names = ("rank", "pid", "host", "signal", "lost")
            facts = {name: vars(error).get(name) for name in names}
            stack = "".join(traceback.format_exception(error))
            return {
                "value": None,
                "error": {"kinds": kinds, "text": str(error), "facts": facts, "stack": stack},
                "seconds": time.monotonic() - began,
            }


def drive(kind: str, master: str, answers: int) -> None:
    """Serve a session on this cluster, with every coordinator behind a proxy."""
    import clusters
    from proxy import Proxy
    from tritium.gang.driver import on_cluster as cluster_run
    from tritium.spark.cluster.base import Cluster

    proxies: list[Proxy] = []

    class Behind(cluster_run.Coordinator):  # type: ignore[name-defined, misc]
        """A coordinator that executors reach through a proxy."""

        def __init__(self, *args: Any, **settings: Any) -> None:
            super().__init__(*args, **settings)
            proxies.append(Proxy(self.address))
            self.address = proxies[-1].address

    cluster_run.Coordinator = Behind  # type: ignore[attr-defined]
    Cluster.replacement_seconds = 45.0  # a worker that was killed comes back, however busy this machine is
    started = clusters.session(kind) if not master else clusters.joined(master)
    with started as spark:
        driver = Driver(spark, answers, proxies)
        driver.answer({"application": spark.sparkContext.applicationId, "pid": os.getpid()})
        driver.serve()


if __name__ == "__main__":
    faulthandler.register(signal.SIGUSR1)
    os.environ["TRITIUM_TEST"] = str(os.getpid())  # orphans of this process are looked for by this one
    with contextlib.suppress(KeyboardInterrupt):
        drive(sys.argv[1], sys.argv[2], int(sys.argv[3]))

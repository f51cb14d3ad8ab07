"""`Following`: which version of a published model scores a stream, decided on the driver while the query runs.

Workers can't ask the driver, and a micro-batch must be scored by one version. So a decision has a moment from which it
holds, and a worker compares that with the time of its micro-batch, which is the same in all tasks (worker side:
followed.py). Decision 034.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import hmac
import logging
import os
import pickle
import re
import secrets
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from tritium.errors import BadSetting, ModelError, SignatureMismatch, TritiumError, UntrustedModel
from tritium.events import ModelVersion, stamped
from tritium.model import files
from tritium.model.model import Model, load
from tritium.model.published import local_copy, versions
from tritium.model.registry import is_registered
from tritium.model.signature import Signature
from tritium.model.table import mismatch
from tritium.observe.stream import Callback
from tritium.predict.lock import NAME, Lock
from tritium.spark.session import Session, safely

GRACE = 5.0
"""Seconds between the moment when a decision is written and the first micro-batch for which it holds: more than the
clocks of the machines differ, and more than a new file takes to be seen everywhere."""
LEASE = 3600.0
"""Seconds after which a driver of whom nothing is heard has ended, where the spool is on a store without locks."""
KEPT = 4
"""Decisions that stay where workers read them: the newest, and those that a slow micro-batch may still need."""
_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}
_log = logging.getLogger("tritium")


def seconds_of(every: str | float) -> float:
    """Return "30s", "500ms", "5m" or a number of seconds as seconds. Raises BadSetting."""
    if isinstance(every, str) and (match := re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]+)\s*", every)):
        every = float(match[1]) * _UNITS.get(match[2], -1)
    if isinstance(every, bool) or not isinstance(every, (int, float)) or not 0 < every < float("inf"):
        raise BadSetting(f'every={every!r}: give seconds, or a text such as "30s", "500ms" or "5m".', setting="every")
    return float(every)


@dataclass(frozen=True)
class Followed:
    """What a transformer follows, as `TrainedModel.follow` describes it.

    path     : the directory of versions, or the alias of a model in MLflow's registry.
    contract : the model whose inputs and outputs a version must have.
    """

    path: str
    contract: Model
    trusted: bool | str | Sequence[str] = False
    every: float = 30.0
    spool: str | None = None
    running: list[Following] = field(default_factory=list, compare=False)
    """Those of the streams that were transformed."""

    def newest(
        self, refuse: Callable[[int, str], None] | None = None, current: int = 0, refused: Collection[int] = ()
    ) -> tuple[int, Model] | None:
        """Return the newest version that has the contract's inputs and outputs; None where it is `current`.

        refuse  : called with each newer version that is not taken, and the reason. None: a warning says it.
        refused : versions that are not looked at again.

        An error of the file system or of MLflow is raised: it says nothing about a version.
        """
        refuse = self.warn if refuse is None else refuse
        for number in versions(self.path):
            # Only MLflow's alias can go back to an earlier version.
            if number == current or (number < current and not is_registered(self.path)):
                break
            if number not in refused and (model := self._taken(number, refuse)) is not None:
                return number, model
        return None

    def _taken(self, number: int, refuse: Callable[[int, str], None]) -> Model | None:
        """Return a version's model; None where it is refused."""
        with contextlib.ExitStack() as stack:
            try:
                folder = stack.enter_context(local_copy(self.path, number))
            except ModelError as error:
                refuse(number, f"{type(error).__name__}: {error}")
                return None
            try:
                model = load(folder, trusted=self.trusted)
                refuse_other(self.contract.signature, model.signature)
            except OSError:
                raise
            except TritiumError as error:
                advice = " (follow(…, trusted=…) takes it)" if isinstance(error, UntrustedModel) else ""
                refuse(number, f"{type(error).__name__}: {error}{advice}")
            except Exception as error:  # noqa: BLE001 - a version's code may raise anything
                refuse(number, f"{type(error).__name__}: {error}")
            else:
                return model
        return None

    def warn(self, number: int, reason: str) -> None:
        """Log that a version is refused."""
        _log.warning("Version %d of %s is refused, and the one before goes on. %s", number, self.path, reason)


def refuse_other(contract: Signature, new: Signature) -> None:
    """Raise SignatureMismatch where a model reads other columns than the contract, or returns something else."""
    differences = [
        f"{what} {after!r}, and the query has {before!r}."
        for what, before, after in (
            ("its task is", contract.task, new.task),
            ("its outputs are", _outputs(contract), _outputs(new)),
            ("its inputs are", _inputs(contract), _inputs(new)),
            ("its classes are", contract.class_words, new.class_words),
        )
        if before != after
    ]
    if differences:
        raise mismatch(differences)


def _outputs(signature: Signature) -> list[tuple[Any, ...]]:
    return [(o.name, o.dtype, o.scalar or o.shape) for o in signature.outputs]


def _inputs(signature: Signature) -> list[tuple[Any, ...]]:
    return [(i.name, i.columns) for i in signature.inputs]


class Following:
    """The decisions for one streaming DataFrame: a thread reads the directory, and writes what workers read.

    A decision is a file `<order>` in the spool, from 1: the moment from which it holds, the version's number, and the
    plan by which a worker restores the model, signed with a key that only the query has. The model's weights are a file
    beside it. A driver that lives holds the spool's lock.
    """

    def __init__(self, followed: Followed, spark: Any, callbacks: Sequence[Callback]) -> None:
        if is_registered(followed.path) and followed.spool is None:
            raise BadSetting(
                f"follow({followed.path!r}) of a stream needs spool=: a directory, or an fsspec URL, that this process "
                "writes and the executors read.",
                setting="spool",
            )
        self._followed = followed
        self._session = Session.of(spark)
        self._id = secrets.token_hex(8)
        self._key = secrets.token_bytes(32)
        spool = f"{followed.spool or f'{followed.path}/.following'}/{self._id}"
        _, root, local = files.opened(spool)
        self._spool = root if local else spool  # Workers have other working directories.
        self._refused: set[int] = set()
        self._failed = False
        self._kept: list[list[str]] = []
        self._callbacks = callbacks
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tritium-follow", daemon=True)
        self._number = 0
        self.first = followed.newest(self.refuse) or (0, followed.contract)
        """The number and the model of the version with which the query begins."""
        self._number = self.first[0]
        self._order = 0
        self._lock = Lock(self._spool, max(LEASE, 8 * followed.every))

    def facts(self) -> dict[str, Any]:
        """Return what a worker has to know, beside the plan of the version that the query begins with."""
        every = max(1, round(self._followed.every * 1e6))
        return {"id": self._id, "key": self._key, "spool": self._spool, "every": every, "number": self._number}

    def start(self, plan_of: Callable[[Model], tuple[dict[str, Any], Any]]) -> None:
        """Start the thread, and remove the spool when this process ends, if the query ends with it.

        plan_of : returns the plan of a model for the stream's columns, and the `Weights` that it names.
        """
        self._plan_of = plan_of
        store, root, _ = files.opened(self._spool)
        store.makedirs(root, exist_ok=True)
        if not self._session.connect:  # There the query lives on when this process ends, and needs its spool.
            atexit.register(self.stop)
            self._lock.take()
            remove_abandoned(self._spool.rpartition("/")[0])
        self._followed.running.append(self)
        self._thread.start()

    def stop(self) -> None:
        """End the thread and remove the spool. Queries of the DataFrame must have ended."""
        atexit.unregister(self.stop)
        self._stopped.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()
        store, root, local = files.opened(self._spool)
        with contextlib.suppress(OSError):
            self._lock.release()
            files.remove(store, local, root)
        above = root.rpartition("/")[0]
        with contextlib.suppress(OSError):
            store.rmdir(above)

    def refuse(self, number: int, reason: str) -> None:
        """Say once that a version is not taken."""
        if number not in self._refused:
            self._refused.add(number)
            self._say(number, reason)

    def _run(self) -> None:
        while not self._stopped.wait(self._followed.every):
            if safely(lambda: self._session.is_stopped, True):
                return
            try:
                self._lock.renew()
                self._look()
            except Exception as error:  # noqa: BLE001 - whatever a store raises: the query goes on as it is
                if not self._failed:
                    _log.warning("The versions at %s can't be read, and the query goes on with version %d: %s: %s",
                                 self._followed.path, self._number, type(error).__name__, error)  # fmt: skip
                self._failed = True
            else:
                self._failed = False

    def _look(self) -> None:
        """Take a newer version, if there is one."""
        newest = self._followed.newest(self.refuse, self._number, self._refused)
        if newest is None:
            return
        number, model = newest
        try:
            plan, weights = self._plan_of(model)
        except (SignatureMismatch, BadSetting) as error:
            self.refuse(number, f"{type(error).__name__}: {error}")
            return
        self._write(number, plan, weights)
        self._number = number
        self._say(number, None)

    def _write(self, number: int, plan: dict[str, Any], weights: Any) -> None:
        """Write the weights, and then the decision, which holds from the next multiple of `every` after the grace."""
        store, root, local = files.opened(self._spool)
        self._order += 1
        order = self._order
        name = f"{self._id}-{order}-{plan['weights']}"
        plan = {**plan, "weights": name, "content": f"{plan['content']}-{self._id}-{order}"}
        sums = files.put(store, local, f"{root}/{name}", weights.stream())
        every = self.facts()["every"]
        since = (int((time.time() + GRACE) * 1e6) // every + 1) * every
        body = pickle.dumps({"since": since, "number": number, "sums": sums, "plan": pickle.dumps(plan)})
        signed = hmac.digest(self._key, body, hashlib.sha256) + body
        part = f"{root}/{order}.part" if local else f"{root}/{order}"
        files.put(store, local, part, [signed])
        if local:
            os.replace(part, f"{root}/{order}")
        if (late := time.time() - since / 1e6) > 0:
            _log.warning("The file system took %.0f s to write version %d: one micro-batch may have been scored by two "
                         "versions, as its column model_version shows.", late + GRACE, number)  # fmt: skip
        self._kept.append([f"{root}/{order}", f"{root}/{name}"])
        for path in self._kept.pop(0) if len(self._kept) > KEPT else ():
            store.rm_file(path)

    def _say(self, number: int, reason: str | None) -> None:
        path = self._followed.path
        if reason is None:
            _log.info("Version %d of %s is taken from the next micro-batches on.", number, path)
        else:
            self._followed.warn(number, reason)
        event = stamped(ModelVersion(path=path, version=number, refused=reason))
        for callback in self._callbacks:
            callback(event)


def remove_abandoned(spools: str) -> None:
    """Remove the spools in a directory whose drivers were killed."""
    store, root, local = files.opened(spools)
    for name in [path.rstrip("/").rpartition("/")[2] for path in store.ls(root, detail=False)]:
        lock = Lock(f"{spools}/{name}")
        with contextlib.suppress(OSError):  # Another process removes it, too; or it has no lock.
            # An empty lock is one that its driver is about to take.
            if store.cat_file(f"{root}/{name}/{NAME}") and lock.take() is None:
                files.remove(store, local, f"{root}/{name}")
                lock.release()

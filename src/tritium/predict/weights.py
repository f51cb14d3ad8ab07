"""The transfer of weights to the executors, and one mapped file of them there (driver; Spark's Python worker).

Classic Spark has broadcasts: the first worker of an executor writes the broadcast to a file in Spark's own scratch
directory, which Spark removes, and every worker maps that file. Spark Connect has artifacts, which are files already,
but not for the tasks of a streaming query: there the function of the workers carries the weights.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from tritium.errors import BadSetting
from tritium.model.engine import Buffer, Weights
from tritium.model.files import mapped
from tritium.spark import is_connect

CARRIED_BYTES = 64 << 20
"""The most bytes of weights that a streaming query of Connect carries. A server takes messages of 128 MB."""
_artifacts: set[tuple[str, str]] = set()


def send(spark: Any, name: str, weights: Weights, carried: bool) -> Any:
    """Send the weights, and return a handle for `receive`: a broadcast, the name of a Connect artifact, or themselves.

    name    : the file's name, which contains the digest of the weights.
    carried : whether the handle is to be the weights themselves, for a streaming query of Connect.

    Raises BadSetting where they are too large to be carried.
    """
    if carried:  # Spark gives its tasks the artifacts of a session "default", which has none.
        return _carried(weights)
    if not is_connect(spark):
        return spark.sparkContext.broadcast([bytes(piece) for piece in weights.stream()])
    artifact = f"tritium-{name}"
    if (spark.session_id, artifact) not in _artifacts:  # Connect refuses an artifact that it has already.
        with tempfile.TemporaryDirectory(prefix="tritium-") as folder:
            path = os.path.join(folder, artifact)
            with open(path, "wb") as file:
                file.writelines(weights.stream())
            spark.addArtifacts(path, file=True)
        _artifacts.add((spark.session_id, artifact))
    return artifact


def _carried(weights: Weights) -> SimpleNamespace:
    if (total := sum(piece.nbytes for piece in weights.stream())) > CARRIED_BYTES:
        raise BadSetting(
            f"The model's weights are {total / (1 << 20):.0f} MB, and a streaming query of Spark Connect can carry "
            f"{CARRIED_BYTES >> 20}. Score in writeStream.foreachBatch(…), whose DataFrames are batches, or in a "
            "classic session."
        )
    # Executors unpickle it before they have this package.
    return SimpleNamespace(value=[bytes(piece) for piece in weights.stream()])


def session_of(spark: Any) -> str:
    """Return the id of the Connect session or classic application, with which sent weights end."""
    from tritium.spark.session import Session  # No executor has it.

    return Session.of(spark).id


def receive(name: str, sent: Any) -> Buffer:
    """Return the file of the weights, mapped, which all workers of this executor share (Python worker)."""
    with local_file(name, sent) as path:
        return mapped(path)


@contextmanager
def local_file(name: str, sent: Any) -> Iterator[str]:
    """Yield the path of the file of the weights. It may end with the block; who has opened or mapped it keeps it."""
    if isinstance(sent, str):
        from pyspark import SparkFiles

        yield SparkFiles.get(sent)
    elif (folder := scratch()) is not None:
        yield _shared(os.path.join(folder, f"tritium-{name}"), sent)
    else:
        with tempfile.NamedTemporaryFile(suffix=f"-{name}") as file:
            file.writelines(_pieces(sent))
            file.flush()
            yield file.name


def scratch() -> str | None:
    """Return a directory that Spark removes: YARN's of this application, or this executor's own; None without one."""
    for variable in ["LOCAL_DIRS"] * ("CONTAINER_ID" in os.environ) + ["SPARK_LOCAL_DIRS"]:
        for folder in os.environ.get(variable, "").split(","):
            if folder and os.access(folder, os.W_OK):
                return folder
    return None


def _shared(path: str, sent: Any) -> str:
    """Return `path`, which the first caller writes. Its name has the hash of its content; it appears by a rename."""
    if os.path.exists(path):
        return path
    with open(f"{path}.lock", "wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # Others wait, or each would unpack the weights into its own memory.
        if not os.path.exists(path):
            handle, beside = tempfile.mkstemp(dir=os.path.dirname(path), prefix="tritium-", suffix=".part")
            try:
                with os.fdopen(handle, "wb") as file:
                    file.writelines(_pieces(sent))
                os.rename(beside, path)
            except BaseException:
                os.unlink(beside)
                raise
    return path


def _pieces(sent: Any) -> Iterable[bytes]:
    pieces: Iterable[bytes] = sent.value
    vars(sent).pop("_value", None)  # Else Broadcast keeps a second copy in every reused worker.
    return pieces

"""What is read of Spark's, Py4J's and PySpark's private interfaces, each behind a probe and a switch (driver).

`spark.tritium.inside=-as_rows,-hadoop` turns some of them off for a session: Tritium then does the same by public
interfaces, more slowly, or leaves it. A Spark that lacks one is found by its probe, and treated alike.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tritium.errors import BadSetting
from tritium.hints import did_you_mean
from tritium.spark import is_connect

SETTING = "spark.tritium.inside"

USES = {
    "as_rows": "rows, not columnar batches, as the input of the scoring function; off: what Spark gives it",
    "batch_bytes": "no check of how many bytes a batch holds, where none holds too many; off: Spark checks",
    "end_of_stream": "the end of a rank's rows by the worker's protocol; off: Spark sorts the rows",
    "hadoop": "models through Hadoop's file systems; off: through fsspec, as over Connect",
    "hangs": "DataFrames that Spark 4.2.0 never computes; off: they are not refused",
    "jvm_bytes": "arrays leave the JVM as bytes; off: number by number",
    "partitions": "scoring that resumes computes chosen partitions; off: `score(into=…)` is refused",
    "plans": "shapes and Python functions by the query plan; off: the ranks see the first row",
    "pods": "why the pods of executors are pending, by Spark's Kubernetes client; off: they are waited for in silence",
    "profiles": "tasks of another size over Connect; off: those of the session's size only",
    "scheduler": "slots and executors as Spark's scheduler counts them; off: `start_timeout` ends a gang without slots",
    "tasks": "the tasks of a run's job in its timeline; off: they are not in it",
}
"""Use → what for, and what happens without it."""


@dataclass
class _Probed:
    """What the probe of one use has returned in one application."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    done: bool = False
    why_not: str | None = None


_probed: dict[tuple[str, str], _Probed] = {}


class Inside:
    """One use of private interfaces.

    name      : under which it is turned off.
    probe     : returns why this Spark can't be used so, or raises; None where it can. Called once an application.
    needs_jvm : whether it takes the JVM of a classic session.
    """

    def __init__(self, name: str, probe: Callable[[Any], str | None], *, needs_jvm: bool = True) -> None:
        self.name = name
        self._probe = probe
        self._needs_jvm = needs_jvm

    def why_not(self, spark: Any) -> str | None:
        """Return why it is not used in this session; None where it is. Raises BadSetting for a wrong SETTING."""
        if self._needs_jvm and is_connect(spark):
            return "Spark Connect has no access to the JVM"
        if self.name in turned_off(str(spark.conf.get(SETTING, "") or "")):
            return f"{SETTING}=-{self.name}"
        application = spark.session_id if is_connect(spark) else spark.sparkContext.applicationId
        probed = _probed.setdefault((self.name, str(application)), _Probed())
        with probed.lock:
            if not probed.done:
                try:
                    probed.why_not = self._probe(spark)
                except Exception as error:  # noqa: BLE001 - whatever another Spark's inside answers, there is another way
                    probed.why_not = _reason(error)
                probed.done = True
            return probed.why_not

    def __call__(self, spark: Any) -> bool:
        """Return whether it is used in this session."""
        return self.why_not(spark) is None


def turned_off(text: str) -> set[str]:
    """Return the uses that a value of SETTING turns off. Raises BadSetting for one that does not exist."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    for part in parts:
        if part[:1] != "-" or part[1:] not in USES:
            raise BadSetting(
                f"{SETTING}={text!r} turns off by name: -{', -'.join(USES)}. There is no {part!r}."
                f"{did_you_mean(part, [f'-{name}' for name in USES])}",
                setting=SETTING,
            )
    return {part[1:] for part in parts}


def _reason(error: Exception) -> str:
    thrown = getattr(error, "java_exception", None)  # Its text names the class.
    text = f"{type(error).__name__}: {error}" if thrown is None else str(thrown.toString())
    return text.partition("\n")[0]

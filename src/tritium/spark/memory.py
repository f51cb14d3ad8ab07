"""The memory of an executor beside Java's heap, as its cluster grants it, and what ranks take of it (driver)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tritium.errors import BadSetting
from tritium.spark.session import Session

OVERHEAD = "spark.executor.memoryOverhead"
WORKER = "spark.executor.pyspark.memory"
_LEAST = "spark.executor.minMemoryOverhead"
_OF_JVM = 300 << 20
"""Bytes beside its heap that the JVM of an executor takes: classes, threads, buffers of the network."""
_OF_RANK = 400 << 20
"""Bytes of a rank that has imported torch (308 MB were measured), and of its supervisor."""
_LEAST_ADDRESSES = 512 << 20
"""Bytes of address space with which a Python worker of Spark's starts: with 600m it did, with 300m it did not."""


def size_of(text: str) -> int:
    """Return a size of Spark's, such as 4g or 512m, in bytes; without a unit it is in MiB."""
    units = {"k": 10, "m": 20, "g": 30, "t": 40, "p": 50}
    digits = text.strip().lower().removesuffix("b")
    unit = digits[-1:]
    return int(digits[:-1]) << units[unit] if unit in units else int(digits) << 20


def granted(session: Session, factors: Sequence[str]) -> tuple[int, str]:
    """Return the bytes that an executor's container may take beside the heap, and by which settings.

    factors : the settings of the share of the heap, of which the first that is set counts.
    """
    setting = session.setting
    if overhead := setting(OVERHEAD):
        return size_of(overhead), f"{OVERHEAD}={overhead}"
    in_pod = setting("spark.kubernetes.submitInDriver") == "true"  # Cluster mode, where a Python driver has more.
    factor = float(next(filter(None, map(setting, factors)), "0.4" if in_pod else "0.1"))
    least = setting(_LEAST, "384m")
    share = int(factor * size_of(setting("spark.executor.memory", "1g")))
    return max(share, size_of(least)), f"{factor:.0%} of spark.executor.memory, at least {least}"


def notes(session: Session, factors: Sequence[str], ranks: int) -> Iterator[str]:
    """Yield the note of an executor that has too little memory for its ranks. No `factors`: nothing limits it."""
    if not factors:
        return
    granted_bytes, why = granted(session, factors)
    needed = _OF_JVM + _OF_RANK * ranks
    if granted_bytes < needed:
        yield (
            f"an executor has {granted_bytes >> 20} MB beside Java's heap ({why}), and {ranks} rank(s) with torch "
            f"take {needed >> 20} MB and more: over its limit the container is killed. Set it before the session: "
            f"{OVERHEAD}={needed >> 20}m or more"
        )


def check_workers(session: Session) -> None:
    """Raise BadSetting where Spark's limit of address space is too low for a Python worker to start at all."""
    limit = session.setting(WORKER, "0")
    cores = max(1, int(session.setting("spark.executor.cores", "1")))
    if limit and 0 < size_of(limit) // cores < _LEAST_ADDRESSES:
        raise BadSetting(
            f"{WORKER}={limit} limits the address space of each Python worker to {size_of(limit) // cores >> 20} MB, "
            f"with which none can start ({_LEAST_ADDRESSES >> 20} MB are the least). Start the session without "
            f"that setting; {OVERHEAD} is for the memory of Python.",
            setting=WORKER,
        )

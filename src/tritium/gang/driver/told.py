"""What failed, where, and the next move, of an event or of a report (driver)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tritium.gang.failure import ADVICE, Failure
from tritium.ui.told import Told

_MEMORY = (
    "Take a smaller batch_size, fewer ranks to a host (cpus=), or give Python on the executors more memory "
    "(spark.executor.memoryOverhead)."
)
_NEXT = {
    "exception": 'Read its traceback. With on="here" the function runs in the calling process, where a debugger stops.',
    "exit": "Read the last lines of its log: they say why the program has left.",
    "lost": "See why Spark lost the executor: its page of executors, and the log of the host.",
    "orphaned": "See why Spark's Python daemon on that host was killed: the log of the executor.",
    **ADVICE,
}


def told(fields: Mapping[str, Any], run_dir: str) -> Told:
    """Return the failure with the fields of GangFailed, or of a report."""
    if fields.get("rank") is None:  # Of a source, the session, a disk: the text has what, where and the next move.
        text = f"{fields.get('type', '').removeprefix('tritium.errors.')}: {fields.get('text', '')}"
        first, _, rest = text.partition("\n")
        return Told(_capital(first), "", "\n".join(filter(None, [rest, fields.get("traceback", "")])).strip())
    failure = Failure.read(dict(fields), b"")
    killed = failure.how == "signal" and failure.signal == "SIGKILL"
    next_move = _NEXT.get(failure.how, "")
    if killed and "from outside" in failure.headline():
        next_move = "Look for who killed it: the host's log, the cluster manager, a person. retries= starts it again."
    elif killed or failure.type == MemoryError.__name__:
        next_move = _MEMORY
    return Told(_capital(failure.headline()), next_move, str(failure.error(run_dir)))


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]

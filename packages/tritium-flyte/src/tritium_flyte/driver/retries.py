"""Whether a task that failed is worth another attempt, for whichever version of Flyte (driver)."""

from __future__ import annotations

from tritium.errors import TritiumError

_MISSING = (FileNotFoundError, FileExistsError, PermissionError, IsADirectoryError, NotADirectoryError)
_JVM_GONE = ("Py4JNetworkError", "Py4JError")


def may_succeed_later(error: Exception) -> bool:
    """Return whether the same task may succeed.

    True  : a lost rank, executor, host or map output, a stall, a gang that did not start, a connection or a write that
            failed (`error.retry`); OSError and TimeoutError on the driver, as of a store that does not answer; a JVM
            that ended.
    False : what the user's function raised; data, settings, versions; a file that is missing or forbidden; out of
            memory, as the next attempt has no more of it.
    """
    if isinstance(error, TritiumError):
        return error.retry and not error.out_of_memory
    if type(error).__name__ in _JVM_GONE:
        return True
    return isinstance(error, OSError) and not isinstance(error, _MISSING)

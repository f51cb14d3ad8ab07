"""What becomes of an error: whether Flyte tries the task again, and by what code the caller knows it (driver)."""

from __future__ import annotations

import flyte.errors

from tritium.errors import RankFailed, TritiumError

OUT_OF_MEMORY = "OOM"
"""The code by which Flyte raises `flyte.errors.OOMError` in the calling task, which may ask for more and call again."""
_MISSING = (FileNotFoundError, FileExistsError, PermissionError, IsADirectoryError, NotADirectoryError)
_JVM_GONE = ("Py4JNetworkError", "Py4JError")


def in_flytes_terms(error: Exception, *, raises_memory: bool = False) -> Exception:
    """Return the error that Flyte knows what to do with: its text is the whole story, its code the class.

    Flyte tries everything again but NonRecoverableError. Here, that is:

    tried again     : a lost rank, executor, host or map output, a stall, a gang that did not start, a connection or a
                      write that failed (`error.retry`); OSError and TimeoutError on the driver, as of a store that does
                      not answer; a JVM that ended; out of memory where `raises_memory`.
    not tried again : what the user's function raised; data, settings, versions; a file that is missing or forbidden;
                      out of memory otherwise, with the code "OOM".

    Flyte's own errors stay as they are.

    raises_memory : whether the next attempt has more memory.
    """
    if isinstance(error, (flyte.errors.BaseRuntimeError, flyte.errors.NonRecoverableError)):
        return error
    text, code = str(error) or repr(error), type(error).__name__
    if isinstance(error, TritiumError):
        if error.out_of_memory:
            if raises_memory:
                return flyte.errors.RuntimeUserError(OUT_OF_MEMORY, text)
            return error_for_good(text, OUT_OF_MEMORY)
        if error.retry:
            return flyte.errors.RuntimeSystemError(code, text)
        cause = error.__cause__ if isinstance(error, RankFailed) else None
        return error_for_good(text, type(cause).__name__ if cause is not None else code)
    if isinstance(error, MemoryError):
        return error_for_good(text, OUT_OF_MEMORY)
    if code in _JVM_GONE or (isinstance(error, OSError) and not isinstance(error, _MISSING)):
        return flyte.errors.RuntimeSystemError(code, text)
    return error_for_good(text, code)


def error_for_good(text: str, code: str) -> flyte.errors.NonRecoverableError:
    """Return an error after which there is no further attempt."""
    return flyte.errors.NonRecoverableError(text, code=code)

"""What becomes of an error: whether Flyte tries the task again, and by what code the caller knows it (driver)."""

from __future__ import annotations

import flyte.errors

from tritium.errors import RankFailed, TritiumError
from tritium_flyte.driver.retries import may_succeed_later

OUT_OF_MEMORY = "OOM"
"""The code by which Flyte raises `flyte.errors.OOMError` in the calling task, which may ask for more and call again."""


def in_flytes_terms(error: Exception, *, raises_memory: bool = False) -> Exception:
    """Return the error that Flyte knows what to do with: its text is the whole story, its code the class.

    Flyte tries everything again but NonRecoverableError, which is here what `may_succeed_later` denies. Out of memory
    is tried again where `raises_memory`, and has the code "OOM". Flyte's own errors stay as they are.

    raises_memory : whether the next attempt has more memory.
    """
    if isinstance(error, (flyte.errors.BaseRuntimeError, flyte.errors.NonRecoverableError)):
        return error
    text, code = str(error) or repr(error), type(error).__name__
    if isinstance(error, TritiumError) and error.out_of_memory:
        if raises_memory:
            return flyte.errors.RuntimeUserError(OUT_OF_MEMORY, text)
        return error_for_good(text, OUT_OF_MEMORY)
    if isinstance(error, MemoryError):
        return error_for_good(text, OUT_OF_MEMORY)
    if may_succeed_later(error):
        return flyte.errors.RuntimeSystemError(code, text)
    cause = error.__cause__ if isinstance(error, RankFailed) else None
    return error_for_good(text, type(cause).__name__ if cause is not None else code)


def error_for_good(text: str, code: str) -> flyte.errors.NonRecoverableError:
    """Return an error after which there is no further attempt."""
    return flyte.errors.NonRecoverableError(text, code=code)

"""A run and its handle: attempts until one succeeds, in the calling thread or in one of its own (driver)."""

from __future__ import annotations

import atexit
import contextvars
import threading
import time
import warnings
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

from tritium.errors import BadRow, RankFailed, RunCancelled, TritiumError, TritiumWarning, masked
from tritium.gang.driver import launcher
from tritium.gang.driver.retry import run_with_retries
from tritium.observe.stream import listeners

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tritium.events import Event
    from tritium.gang.driver.attempt import Attempt
    from tritium.observe.stream import Callback

LISTEN_SECONDS = 10.0
"""The limit for callbacks of `tritium.listen` when the run has ended."""
EXIT_SECONDS = 10.0
"""The limit for runs to end when the interpreter exits."""
_WAKE_SECONDS = 1.0  # Python misses a signal that comes between its last check and an endless wait.

Status = Literal["starting", "running", "succeeded", "failed", "cancelled"]

_unfinished: set[Run] = set()


class Run:
    """A run that `tritium.submit` has started. Its methods may be called from any thread.

        with tr.submit(train, ranks=2) as run:
            for event in run.events():
                ...
            results = run.result()

    Leaving the block while the run goes on, also by an exception, cancels it and waits until its ranks are gone. So
    does the end of the interpreter.

    id      : the id of the run.
    run_dir : its run directory.
    report  : the content of `report.json`; empty until the run has ended.
    """

    def __init__(self, attempt: Attempt) -> None:
        self.id = attempt.run_id
        self.run_dir = attempt.recorder.run_dir
        self.report: dict[str, Any] = {}
        self._attempt = attempt
        self._ended = threading.Event()
        self._results: list[Any] = []
        self._error: BaseException | None = None
        self._warnings: list[str] = []
        self._thread: threading.Thread | None = None
        self.describe: Callable[[list[Any]], Event] | None = None
        """Returns an event about the results, which is recorded before the run ends."""

    def __repr__(self) -> str:
        return f"<tritium.Run {self.id} {self.status}, {self.run_dir}>"

    def _repr_html_(self) -> str:
        """Show a notebook what report.html shows of the run so far."""
        return self._attempt.recorder.page()

    @property
    def done(self) -> bool:
        """Whether the run has ended, and nothing of it is left."""
        return self._ended.is_set()

    @property
    def status(self) -> Status:
        """Where the run is: "running" while its gang is formed, "starting" before that and between two attempts."""
        if not self.done:
            return "running" if self._attempt.recorder.formed else "starting"
        if self._error is None:
            return "succeeded"
        return "cancelled" if isinstance(self._error, RunCancelled) else "failed"

    def result(self, timeout: float | None = None) -> list[Any]:
        """Wait for the end of the run, and return one value per rank, in rank order.

        Raises the errors of `launch`, RunCancelled after `cancel`, and TimeoutError after `timeout` seconds. After the
        last, and after Ctrl-C, the run goes on.
        """
        if not self._wait(timeout):
            raise TimeoutError(
                f"Run {self.id} has not ended within {timeout:g} s, and goes on. Call result() again, or cancel()."
            )
        self._warn(3)
        if self._error is not None:
            raise self._error
        return self._results

    def cancel(self) -> None:
        """Have the run end: ranks are killed, and a Spark job is cancelled. Returns at once; see `result`.

        With `on="here"` the function is interrupted as by Ctrl-C; a call into C ends first. Nothing happens when the
        run has ended.
        """
        self._attempt.cancellation.request()

    def events(self) -> Iterator[Event]:
        """Iterate over the events of the run so far, and over further ones as they come, until its end."""
        stream = iter(self._attempt.recorder.stream)
        while True:
            with self._interrupts():
                event = next(stream, None)
            if event is None:
                return
            yield event

    def __enter__(self) -> Run:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.cancel()
        self._wait(None)

    # ---- For this package

    def complete(self) -> list[Any]:
        """Run in the calling thread, and return the results. Raises the error that ended the run, as it was raised.

        Warnings are those of the code that called `launch`.
        """
        try:
            self._execute()
        finally:
            self._warn(5)
        return self._results

    def start(self) -> None:
        """Run in a thread that has the context variables and Spark's local properties of this one."""
        context = contextvars.copy_context()
        if not _unfinished:
            atexit.unregister(_cancel_all)
            atexit.register(_cancel_all)  # Again, so that it comes before what others have registered since.
        _unfinished.add(self)
        try:
            self._thread = launcher.start_thread(self._attempt, lambda: context.run(self._execute_in_thread))
        except BaseException:
            _unfinished.discard(self)
            raise

    def _execute_in_thread(self) -> None:
        try:
            self._execute()
        except BaseException:  # noqa: BLE001 - `result` raises it.
            return
        finally:
            _unfinished.discard(self)

    def _execute(self) -> None:
        listening = self._listen(listeners())
        try:
            self._results = self._attempts()
        except BaseException as error:
            self._error = error
            raise
        finally:
            try:
                self._close(listening)
            except BaseException as error:
                self._error = self._error or error
                raise
            finally:
                self._ended.set()

    def _attempts(self) -> list[Any]:
        attempt = self._attempt
        if attempt.gang.max_runtime is not None:
            attempt.deadline = time.monotonic() + attempt.gang.max_runtime
        try:
            results = run_with_retries(attempt, attempted)
            attempt.recorder.wait_for_uploads(attempt.cancellation.check)
            if self.describe is not None:
                attempt.recorder.event(self.describe(results))
        except BaseException:
            attempt.slots.release()
            release(attempt, ok=False)
            raise
        attempt.slots.release()
        release(attempt, ok=True)
        return results

    def _close(self, listening: threading.Thread | None) -> None:
        recorder = self._attempt.recorder
        try:
            self.report = recorder.close(self._error)
        finally:  # Else who reads the events would wait for ever.
            recorder.stream.close()
        if listening is not None:
            listening.join(LISTEN_SECONDS)
        self._warnings += recorder.problems
        if self._error is None:
            self._warnings += [error.as_warning(self.run_dir) for error in recorder.non_fatal_errors]

    def _listen(self, callbacks: tuple[Callback, ...]) -> threading.Thread | None:
        """Start a thread that calls the callbacks for each event."""
        if not callbacks:
            return None

        def deliver() -> None:
            failed = False
            for event in self.events():
                for callback in callbacks:
                    try:
                        callback(event)
                    except BaseException as error:  # noqa: BLE001 - It ends neither the run nor other callbacks.
                        if not failed:
                            failed = True
                            text = f"A callback of tritium.listen raised {type(error).__name__}: {error}"
                            self._attempt.recorder.note(f"{text} (event {event.kind!r}; further ones are not shown)")

        target = contextvars.copy_context().run
        thread = threading.Thread(target=target, args=(deliver,), name=f"tritium-listen-{self.id}", daemon=True)
        thread.start()
        return thread

    def _wait(self, timeout: float | None) -> bool:
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._interrupts():
            while not self._ended.is_set():
                left = _WAKE_SECONDS if deadline is None else deadline - time.monotonic()
                if left <= 0:
                    return False
                self._ended.wait(min(left, _WAKE_SECONDS))
        return True

    def _interrupts(self) -> AbstractContextManager[None]:
        """Let Ctrl-C end the wait of this block alone, and not what else runs in the session."""
        return launcher.own_interrupts() if self._attempt.gang.on == "cluster" else nullcontext()

    def _warn(self, stacklevel: int) -> None:
        """Warn, once, of facts that are known at the end.

        stacklevel : that of the user's code, as `warnings.warn` counts.
        """
        texts, self._warnings = self._warnings, []
        for text in texts:
            warnings.warn(masked(text), TritiumWarning, stacklevel=stacklevel)


def _cancel_all() -> None:
    """Cancel the runs that have not ended, and wait for them: nothing of them shall outlive the interpreter."""
    runs, deadline = list(_unfinished), time.monotonic() + EXIT_SECONDS
    for run in runs:
        run.cancel()
    for run in runs:
        if run._thread is not None:
            run._thread.join(max(0.0, deadline - time.monotonic()))


def attempted(attempt: Attempt) -> list[Any]:
    """Run one attempt. Rows stay persisted after a loss only when their executors live on (a process ended)."""
    try:
        return launcher.run(attempt)
    except BadRow as error:
        from tritium.gang.driver.bad_rows import located

        release(attempt, ok=False)
        raise located(error, attempt) from error.__cause__
    except TritiumError as error:
        of_process = isinstance(error, RankFailed) and not (error.signal is None and error.exit_code is None)
        if not of_process:
            release(attempt, ok=False)
        raise
    finally:
        attempt.recorder.drop_partial()


def release(attempt: Attempt, ok: bool) -> None:
    """Unpersist the rows that were kept. After a failed run (not `ok`), an error of that is only noted."""
    try:
        attempt.release()
    except Exception as error:
        if ok:
            raise
        attempt.recorder.note(f"the rows that were kept could not be given back: {error!r:.200}")

"""The interface by which checkpoints reach the other ranks and the driver (any process)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

from tritium.events import Event


class Regroup(BaseException):
    """Ends a gang that is started again elsewhere or larger. A BaseException, so that functions don't catch it."""


class ShowsProgress(Protocol):
    """How a rank shows that it is at work."""

    def touch(self) -> None: ...
    def within(self, operation: str) -> AbstractContextManager[None]: ...


class Control(Protocol):
    """How a rank reaches the rest of its gang to save and load with it."""

    @property
    def progress(self) -> ShowsProgress: ...

    run_dir: str
    elastic: bool
    """Whether the gang has fewer than `gang.most` ranks."""
    could_be_more: bool
    """Whether there are slots for more ranks now."""

    @property
    def notice(self) -> float | None:
        """The monotonic time at which this gang is over, once that was announced; None before."""

    def all_gather(self, operation: str, value: bytes, tag: str = ...) -> list[bytes]: ...
    def all_gather_async(self, operation: str, value: bytes, tag: str = ...) -> Callable[[], list[bytes]]: ...
    def tell(self, event: Event) -> None: ...
    def confirm_rows(self) -> None: ...

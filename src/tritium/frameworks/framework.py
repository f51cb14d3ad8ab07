"""`Framework`: the work of a rank before, around and after the user's function (driver and rank)."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

if TYPE_CHECKING:
    from tritium.observe.trace import Trace


class RankAddress(Protocol):
    """One rank, as every rank knows it."""

    @property
    def host(self) -> str: ...
    @property
    def address(self) -> str: ...
    @property
    def local_rank(self) -> int: ...
    @property
    def device(self) -> str: ...
    @property
    def devices(self) -> Sequence[object]: ...


class Place(Protocol):
    """The rank in which a framework is set up, and its gang: a `World`."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def local_rank(self) -> int: ...
    @property
    def local_size(self) -> int: ...
    @property
    def host(self) -> str: ...
    @property
    def device(self) -> str: ...
    @property
    def peers(self) -> Sequence[RankAddress]: ...
    @property
    def run_id(self) -> str: ...
    @property
    def run_dir(self) -> str: ...
    def gather(self, value: Any) -> list[Any]: ...
    def barrier(self) -> None: ...
    def note(self, text: str) -> None: ...


def own_devices(place: Place) -> range:
    """Return the indices of a rank's own devices among those that it can see, which are those of its neighbours too."""
    first = int(place.device.partition(":")[2])
    return range(first, first + max(1, len(place.peers[place.rank].devices)))


@dataclass(frozen=True, kw_only=True)
class Framework:
    """One framework. A subclass names it, and overrides what it needs; its fields are its settings, plain data.

    An instance is made on the driver and travels to every rank. Methods are called in this order: `wrong` on the
    driver; `prepare`, `load`, `run` in the rank process.
    """

    name: ClassVar[str]
    """As in `framework="…"`."""
    modules: ClassVar[tuple[str, ...]]
    """The modules that a rank imports before its function is called, while its rows arrive. Ranks must have the same
    version of the first one. Ranks are forked after the import, which must open no device, and start only threads that
    a fork does not harm (BLAS)."""
    covers: ClassVar[tuple[str, ...]] = ()
    """Further packages that a function may import under this framework and that are set up with it."""
    install: ClassVar[str]
    """The packages to install where it is missing: `pip install {install}`."""
    tensors: ClassVar[bool] = False
    """Whether batches hold torch tensors unless `epochs(device=…)` says otherwise."""
    float32: ClassVar[bool] = False
    """Whether floating columns are read as float32, its default dtype, unless `tr.Data` gives another one."""
    pmi: ClassVar[bool] = False
    """Whether ranks find each other through the process management interface of MPI (PMI)."""
    secondary: ClassVar[re.Pattern[str] | None] = None
    """Matches "Type: text" of an exception that only says that another rank has ended."""
    aborts: ClassVar[re.Pattern[str] | None] = None
    """Matches the output of a process that the framework aborts because another rank has ended."""

    @property
    def no_rows(self) -> str | None:
        """Why there can be no `data=` with these settings, as a whole sentence; None where there can."""
        return None

    def wrong(self, ranks: int) -> Iterator[str]:
        """Yield each error of the settings for a gang of at least `ranks` ranks, as a whole sentence."""
        yield from ()

    def prepare(self, *, gpus: bool) -> None:
        """Prepare the process before the framework is imported.

        gpus : whether this rank has GPUs of its own.
        """

    def load(self) -> None:
        """Import the framework. Raises ImportError where it is missing."""
        for module in self.modules:
            importlib.import_module(module)

    def run(self, place: Place, function: Callable[[], Any]) -> Any:
        """Call the user's function with the ranks connected, and return its result.

        When the function raises, nothing needs to be undone: the process ends.
        """
        return function()

    def on_returned(self) -> None:
        """End the collectives in which this rank waits, for a rank that has returned.

        Called in a thread of its own while the function runs, when all processes of the gang have been idle for some
        seconds. To be overridden where such a wait outlasts the reset of the connection to that rank.
        """

    def predicting(self, facts: Mapping[str, Any]) -> Framework:
        """Return the framework as it is imported to predict with a model of these facts (`tritium.model.engine`)."""
        return self

    def threads(self, cpus: int | None) -> AbstractContextManager[None]:
        """Return a context in which the framework uses `cpus` threads; None leaves the number as it is."""
        return nullcontext()

    def trace(self, trace: Trace) -> None:
        """Install hooks that measure the parts of a step, in modules that the function has imported."""

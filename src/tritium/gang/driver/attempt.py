"""One attempt to run a gang: what is asked for, and the rows that are kept for the next attempt (driver)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from tritium import ship
from tritium.data.schema import Data
from tritium.gang.driver.recorder import Recorder
from tritium.gang.settings import Gang

if TYPE_CHECKING:
    from tritium.data.exchange import Exchange


@dataclass
class Attempt:
    """What a launcher needs to start a gang."""

    function: Callable[..., Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    gang: Gang
    data: Mapping[str, Data]
    exchange: Exchange | None
    spark: Any
    run_id: str
    recorder: Recorder
    ranks: int
    """The world size of this attempt; the place that runs it may change it within the gang's limits."""
    number: int = 0
    """How often this launch was lost before."""
    tensors: bool = False
    """Whether batches are torch tensors where nothing else is asked for."""
    kept: dict[int, Exchange] = field(default_factory=dict)
    """World size -> rows that are kept for the next attempt: at most one, and the same dict in every attempt."""

    @property
    def name(self) -> str:
        """Of this attempt: supervisors of an earlier one are refused by it."""
        return f"{self.run_id}.{self.number}"

    @property
    def streams(self) -> bool:
        """Whether ranks take rows while others still arrive."""
        return any(data.shuffle == "stream" for data in self.data.values())

    def sized(self, ranks: int) -> Attempt:
        """This attempt with so many ranks."""
        if self.number:
            self.recorder.note(f"starting again with {ranks} rank{'s' * (ranks != 1)}")
        return replace(self, ranks=ranks)

    def dealt(self) -> Exchange | None:
        """The rows of this attempt on Spark: the user's exchange, one that was kept, or a new one."""
        if self.exchange is not None or not self.data:
            return self.exchange
        from tritium.data.exchange import Exchange

        if not self.gang.persist:
            return Exchange(self.data, self.ranks)
        if self.ranks not in self.kept:
            if self.kept:
                self.recorder.note(
                    f"the rows that were kept are dealt to {next(iter(self.kept))} ranks: computed again"
                )
                self.release()
            self.kept[self.ranks] = Exchange(self.data, self.ranks).persist()
        return self.kept[self.ranks]

    def release(self) -> None:
        """Give back the rows that were kept."""
        while self.kept:
            self.kept.popitem()[1].unpersist()

    def job(self) -> bytes:
        """The user's function with everything that goes with it, for the ranks."""
        decode = {name: dict(data.decode) for name, data in self.data.items()}
        job = (self.function, tuple(self.args), dict(self.kwargs), decode, self.tensors)
        return ship.pickle(job, self.gang.py_files)

"""One attempt to run a gang: its inputs, the rows kept for the next one, the order to its supervisors (driver)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from tritium import aliases, frameworks, ship
from tritium.accelerators import Accelerators
from tritium.data.decode import decoders
from tritium.data.schema import Data, Field
from tritium.gang import rank_logs
from tritium.gang.coordinator.coordinator import Coordinator
from tritium.gang.driver import trackers
from tritium.gang.driver.cancellation import Cancellation
from tritium.gang.driver.recorder import Recorder
from tritium.gang.order import Order
from tritium.gang.packages import Packages
from tritium.gang.program import Program
from tritium.gang.settings import Gang
from tritium.gang.stall_limit import StallLimit
from tritium.spark.slots import RunSlots

if TYPE_CHECKING:
    from tritium.data.exchange import Exchange
    from tritium.gang.coordinator.rows import Verify
    from tritium.gang.driver.address import ListenAddress
    from tritium.tls import Certificate


@dataclass
class Attempt:
    """The inputs of a launcher."""

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
    """The world size of this attempt. The launcher may change it within `gang.least` and `gang.most`."""
    number: int = 0
    """The number of this attempt, from 0."""
    deadline: float = math.inf
    """The monotonic time at which `max_runtime` has passed; all attempts share it."""
    tensors: bool = False
    """Whether batches hold torch tensors unless `epochs(device=…)` says otherwise."""
    kept: dict[int, Exchange] = field(default_factory=dict)
    """World size → exchange that is persisted for the next attempt. At most one; all attempts share this dict."""
    slots: RunSlots = field(default_factory=RunSlots)
    """The slots that the run holds until it ends; all attempts share this object."""
    trackers: Mapping[str, str] = field(default_factory=dict)
    """Variables of the ranks that the driver's experiment tracker needs; those of `gang.env` come before them."""
    packages: Packages | None = None
    """What is installed for the ranks alone."""
    cancellation: Cancellation = field(default_factory=Cancellation)
    """Whether the run shall end; all attempts share this object."""

    @property
    def name(self) -> str:
        """The name of this attempt, by which the coordinator refuses supervisors of an earlier one."""
        return f"{self.run_id}.{self.number}"

    @property
    def streams(self) -> bool:
        """Whether ranks read rows while others still arrive (`shuffle="stream"`)."""
        return any(data.shuffle == "stream" for data in self.data.values())

    def sized(self, ranks: int) -> Attempt:
        """Return a copy of this attempt with `ranks` ranks."""
        if self.number:
            self.recorder.note(f"starting again with {ranks} rank{'s' * (ranks != 1)}")
        return replace(self, ranks=ranks)

    def dealt(self) -> Exchange | None:
        """Return the exchange of this attempt: the user's, the persisted one, or a new one; None without data."""
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
        """Unpersist the rows that were kept."""
        while self.kept:
            self.kept.popitem()[1].unpersist()

    def job(self) -> tuple[bytes, dict[str, bytes]]:
        """Pickle the job of every rank: function, arguments, decoders by name, and whether batches are tensors.

        Also return the files that processes which a rank spawns need for their main module.
        """
        decode = {name: decoders(data) for name, data in self.data.items()}
        job = (self.function, tuple(self.args), dict(self.kwargs), decode, self.tensors)
        pickled, defined = ship.pickle_for_ranks(job, self.gang.py_files)
        if isinstance(self.function, Program):
            return pickled, self.function.files
        return pickled, ship.files_of_spawned(defined, self.gang.py_files)


def prepared(shuffle: Any) -> Literal["full", "stream"] | bool:
    """Return the order that an exchange prepares: "stream" (as rows arrive), "full", or False (by row id)."""
    return "stream" if shuffle == "stream" else "full" if shuffle else False


def ship_user_code(attempt: Attempt, files: Mapping[str, bytes]) -> bytes:
    """Return the user's `py_files` and the files of `Attempt.job` as one zip; empty bytes without any."""
    paths = attempt.gang.py_files
    return ship.archive(paths, files) if paths or files else b""


def start_coordinator(
    attempt: Attempt,
    plan: Mapping[str, tuple[Field, ...]],
    place: ListenAddress | None = None,
    verify: Verify | None = None,
    certificate: Certificate | None = None,
) -> Coordinator:
    """Start the coordinator of this attempt.

    certificate : that by which connections to it are encrypted; None: they are not.
    place  : the address at which executors reach it; None: only this machine does.
    verify : returns an error for rows that a rank must not train on (see `Exchange.verify`).
    """
    return Coordinator(
        attempt.ranks,
        launch=attempt.name,
        run_id=attempt.run_id,
        observer=attempt.recorder,
        listener=place.listen() if place else None,
        advertised=place.advertised if place else None,
        names=list(plan),
        stream=attempt.streams,
        stall_limit=StallLimit.of(attempt.gang),
        accelerators=Accelerators.of(attempt.gang),
        verify=verify,
        certificate=certificate,
    ).start()


def order_of(
    attempt: Attempt,
    coordinator: Coordinator,
    plan: Mapping[str, tuple[Field, ...]],
    job: bytes,
    user_code: bytes,
    *,
    sorted: bool,
    deals_few: bool = False,
    result_limit: int = 0,
) -> Order:
    """Build the order that every supervisor of this attempt gets.

    sorted       : whether rows arrive in the order of their ids.
    deals_few    : whether few rows are dealt again: where they come from several source partitions.
    result_limit : the bytes that Spark accepts for all results together (0: any number). Needed on Spark Connect, where
                   the log of a coordinator on an executor is returned with the results.
    """
    gang = attempt.gang
    return Order(
        launch=attempt.name,
        run_id=attempt.run_id,
        size=attempt.ranks,
        address=coordinator.address,
        secret=coordinator.secret,
        certificate=coordinator.certificate,
        job=job,
        env={**attempt.trackers, **rank_logs.described(gang.logs), **gang.env},
        env_above_0={name: value for name, value in trackers.ABOVE_0.items() if name not in gang.env},
        cpus=gang.cpus,
        accelerators=Accelerators.of(gang),
        framework=frameworks.find(gang.framework),
        plan=plan,
        sorted=sorted,
        streams=attempt.streams,
        deals_few=deals_few and not attempt.streams and all(d.together is None for d in attempt.data.values()),
        prepared={name: prepared(data.shuffle) for name, data in attempt.data.items()},
        user_code=user_code,
        packages=attempt.packages,
        elastic=attempt.ranks < gang.most,
        trace=gang.trace,
        result_limit=result_limit,
        stall_limit=StallLimit.of(gang),
        run_dir=attempt.recorder.run_dir,
        imports=imports_of(attempt.function, rows=bool(plan)),
        aliases=aliases.active(),
    )


def imports_of(function: Callable[..., Any], *, rows: bool) -> list[str]:
    """Return the modules of Tritium that every rank of this function would import: 0.3 s for an estimator's."""
    modules = ["tritium.data.shard"] if rows else []
    module = getattr(function, "__module__", None) or ""
    return [*modules, module] if module.startswith("tritium.ml.") else modules


def signalled(coordinator: Coordinator, number: int) -> bool:
    """Send every rank process a signal, once the gang has formed, and return whether it has. Takes no lock."""
    if coordinator.formed:
        coordinator.tell_all("signal", number=int(number))
    return coordinator.formed

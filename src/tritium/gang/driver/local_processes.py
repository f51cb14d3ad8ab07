"""`on="driver"`: ranks are child processes of this one, without Spark and without a JVM (driver).

The coordinator, supervisors, rank processes, receivers and spools are those of a cluster. Only the exchange differs:
pandas and Arrow tables are dealt to the ranks here.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from tritium.gang.coordinator.coordinator import Coordinator
from tritium.gang.driver.attempt import Attempt, order_of, ship_user_code, signalled, start_coordinator
from tritium.gang.driver.certificate import certificate_of
from tritium.gang.driver.outcome import await_end, await_formed
from tritium.gang.order import Order
from tritium.gang.supervisor.ending import GangEnded
from tritium.gang.supervisor.gpus import gpus_here
from tritium.gang.supervisor.results import results_of
from tritium.gang.supervisor.supervisor import Supervisor

if TYPE_CHECKING:
    from tritium.data.schema import Field


class LocalProcesses:
    """Runs each rank as a child process, with its supervisor in a thread of this process."""

    def __init__(self, attempt: Attempt) -> None:
        self._gpus, most = gpus_here(attempt.gang)
        self._attempt = attempt.sized(most)
        self._certificate = certificate_of(attempt.gang.tls, attempt.recorder.note)
        self._coordinator: Coordinator | None = None
        self._tasks: SupervisorThreads | None = None

    def start(self) -> None:
        """Deal the tables, start the coordinator, and start a supervisor thread for every rank."""
        attempt = self._attempt
        plan, shards = deal_tables(attempt)
        job, files = attempt.job()
        user_code = ship_user_code(attempt, files)
        attempt.recorder.open()
        coordinator = self._coordinator = start_coordinator(attempt, plan, certificate=self._certificate)
        order = order_of(attempt, coordinator, plan, job, user_code, sorted=not attempt.streams)
        self._tasks = SupervisorThreads(order, coordinator, shards, self._gpus)
        self._tasks.start()

    def wait(self) -> list[Any]:
        """Return the results of the ranks, or raise the error that ended the gang."""
        assert self._coordinator is not None
        assert self._tasks is not None
        await_formed(self._coordinator, self._attempt, self._tasks)
        await_end(self._coordinator, self._attempt, self._tasks)
        return results_of(self._tasks.batches, self._attempt.ranks)

    def signal(self, number: int) -> bool:
        """Send every rank a signal."""
        return self._coordinator is not None and signalled(self._coordinator, number)

    def interrupt(self) -> None:
        """Wake the thread in `wait`."""
        if self._coordinator is not None:
            self._coordinator.notify()

    def cancel(self) -> None:
        """End the ranks, and wait for their threads."""
        if self._coordinator is not None:
            self._coordinator.abort("the run is over")
            try:
                if self._tasks is not None:
                    self._tasks.join()
                self._coordinator.await_gone(1.0)
            finally:  # A second Ctrl-C must not leave the coordinator, and ranks that it has not ended yet.
                self._coordinator.close()


def deal_tables(attempt: Attempt) -> tuple[dict[str, tuple[Field, ...]], list[Iterator[pa.RecordBatch]]]:
    """Return the fields of every named table, and for each rank its rows as the record batches Spark would deliver."""
    if not attempt.data:
        return {}, [iter(()) for _ in range(attempt.ranks)]
    from tritium.data.tables import Tables

    tables = Tables(attempt.data, attempt.ranks)
    return tables.plan, [tables.batches(rank) for rank in range(attempt.ranks)]


class SupervisorThreads:
    """Runs every supervisor in a thread, instead of in a Spark task; see `outcome.Tasks`."""

    silence = "the rank processes are slow to start"

    def __init__(
        self, order: Order, coordinator: Coordinator, shards: list[Iterator[pa.RecordBatch]], gpus: list[str]
    ) -> None:
        self._gpus = gpus
        self._coordinator = coordinator
        self.batches: list[pa.RecordBatch] = []
        self.problem: BaseException | None = None
        self.ended = False
        self._left = order.size
        self._threads = [
            threading.Thread(
                target=self._supervise, args=(order, index, shard), name=f"tritium-supervisor-{index}", daemon=True
            )
            for index, shard in enumerate(shards)
        ]

    def start(self) -> None:
        """Start every thread."""
        for thread in self._threads:
            thread.start()

    def _supervise(self, order: Order, index: int, shard: Iterator[pa.RecordBatch]) -> None:
        gpus = order.accelerators.of_rank(self._gpus, index)
        supervisor = Supervisor(order, partition=index, attempt=0, gpus=gpus, cpus=order.cpus or 1)
        try:
            # Not in a pool: the kernel kills the rank process when the thread that started it ends (PR_SET_PDEATHSIG).
            batches = list(supervisor.run(shard, lambda: True))
        except GangEnded:
            batches = []
        except BaseException as error:  # noqa: BLE001 - the launching thread raises it
            batches = []
            self.problem = self.problem or error
        with self._coordinator.changed:
            self.batches.extend(batches)
            self._left -= 1
            self.ended = self._left == 0 or self.problem is not None
            self._coordinator.changed.notify_all()

    def computing(self, ranks: int) -> bool:
        """Return False: tables need no computing."""
        return False

    def slots(self) -> int:
        """Return 0: this machine has no slots, so a gang here never grows."""
        return 0

    def leaving(self, executors: set[str]) -> tuple[set[str], float]:
        """Return none: there are no executors."""
        return set(), math.inf

    restarts = False

    def source_stall(self, limit: float) -> None:
        """Return None: tables need no computing."""

    def give_up(self, executor: str) -> None:
        """Do nothing: the threads are in this process."""

    def cancel(self, reason: str) -> None:
        """Do nothing: supervisors end when the coordinator tells them."""

    def join(self, seconds: float = 10.0) -> None:
        """Wait for the supervisor threads, up to `seconds` each."""
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(seconds)

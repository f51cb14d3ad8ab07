"""`on="driver"`: ranks are child processes of this one, without Spark and without a JVM (driver).

The same coordinator, supervisors, rank processes, receiver and spool as on a cluster. Only the exchange is another:
pandas and Arrow tables are dealt to the ranks here.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from tritium.gang.coordinator.stalls import Patience
from tritium.gang.driver.in_process import prepared
from tritium.gang.driver.outcome import await_end, await_formed
from tritium.gang.supervisor.gpus import gpus_here
from tritium.gang.supervisor.results import results_of
from tritium.gang.supervisor.supervisor import GangEnded, Order, Supervisor

if TYPE_CHECKING:
    from tritium.data.schema import Field
    from tritium.gang.coordinator.coordinator import Coordinator
    from tritium.gang.driver.launch import Launch


def run(launch: Launch) -> list[Any]:
    """Start the ranks, wait, return their results."""
    from tritium.gang.coordinator.coordinator import Coordinator

    gang = launch.gang
    gpus, most = gpus_here(gang)
    launch = launch.sized(most)
    plan, shards = deal_tables(launch)
    job = launch.job()
    user_code = ship_user_code(launch)
    launch.watch.open()
    coordinator = Coordinator(
        launch.ranks,
        launch=launch.name,
        run_id=launch.run_id,
        observer=launch.watch,
        names=list(plan),
        stream=launch.streams,
        patience=Patience.of(gang),
    ).start()
    order = order_of(launch, coordinator, plan, job, user_code, sorted=not launch.streams)
    local = Local(order, coordinator, shards, gpus)
    try:
        local.start()
        await_formed(coordinator, launch, local)
        await_end(coordinator, launch, local)
        return results_of(local.batches, launch.ranks)
    finally:
        coordinator.abort("the run is over")
        local.join()
        coordinator.await_gone(1.0)
        coordinator.close()


def deal_tables(launch: Launch) -> tuple[dict[str, tuple[Field, ...]], list[Iterator[pa.RecordBatch]]]:
    """The plan of every named table, and each rank's rows in the form in which Spark would hand them over."""
    if not launch.data:
        return {}, [iter(()) for _ in range(launch.ranks)]
    from tritium.data.tables import Tables

    tables = Tables(launch.data, launch.ranks)
    return tables.plan, [tables.batches(rank) for rank in range(launch.ranks)]


def ship_user_code(launch: Launch) -> bytes:
    """The user's `py_files` as one zip, or nothing."""
    from tritium import ship

    return ship.archive(launch.gang.py_files) if launch.gang.py_files else b""


def order_of(
    launch: Launch,
    coordinator: Coordinator,
    plan: Mapping[str, tuple[Field, ...]],
    job: bytes,
    user_code: bytes,
    *,
    sorted: bool,
    far_limit: int | None = None,
) -> Order:
    """What every supervisor of this launch is told. `sorted`: rows come in the order of their ids. `far_limit`: of a
    Connect client, which executors may not reach: bytes of all results together that its Spark takes (0: any)."""
    gang = launch.gang
    return Order(
        launch=launch.name,
        run_id=launch.run_id,
        size=launch.ranks,
        address=coordinator.address,
        secret=coordinator.secret,
        job=job,
        env=dict(gang.env),
        cpus=gang.cpus,
        gpus=gang.gpus,
        framework=gang.framework,
        plan=plan,
        sorted=sorted,
        streams=launch.streams,
        prepared={name: prepared(data.shuffle) for name, data in launch.data.items()},
        user_code=user_code,
        elastic=launch.ranks < gang.most,
        trace=gang.trace,
        far_client=far_limit is not None,
        far_limit=far_limit or 0,
        patience=Patience.of(gang),
        run_dir=launch.watch.run_dir,
    )


class Local:
    """A thread for every supervisor; the place of Spark's tasks."""

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
        """Start all."""
        for thread in self._threads:
            thread.start()

    def _supervise(self, order: Order, index: int, shard: Iterator[pa.RecordBatch]) -> None:
        gpus = tuple(self._gpus[index * order.gpus : (index + 1) * order.gpus])
        supervisor = Supervisor(order, partition=index, attempt=0, gpus=gpus, cpus=order.cpus or 1)
        try:
            # The interpreter of a thread lives as long as the rank does: the kernel ends the child with its thread.
            batches = list(supervisor.run(shard, lambda: True))
        except GangEnded:
            batches = []
        except BaseException as error:  # noqa: BLE001 - a thread has no one above it; the launching thread raises this
            batches = []
            self.problem = self.problem or error
        with self._coordinator.changed:
            self.batches.extend(batches)
            self._left -= 1
            self.ended = self._left == 0 or self.problem is not None
            self._coordinator.changed.notify_all()

    def computing(self, ranks: int) -> bool:
        """Tables are there already."""
        return False

    def slots(self) -> int:
        """How many ranks this machine could run is not a question of slots."""
        return 0

    restarts = False

    def source_stall(self, limit: float) -> None:
        """Tables are there already."""

    def cancel(self, reason: str = "") -> None:
        """Supervisors end by themselves once the coordinator has said so."""

    def join(self, seconds: float = 10.0) -> None:
        """Wait until every supervisor has ended."""
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(seconds)

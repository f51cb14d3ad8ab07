"""A cluster as a gang needs it: its slots, its resource profiles, and where its executors reach the driver (driver).

A kind of cluster is a class that overrides the methods in which it differs from a classic session whose scheduler
counts slots. Jobs of other drivers, and jobs of this driver that are not launches, are not counted: a gang waits for
its tasks behind them.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, Literal, Protocol

from tritium.accelerators import Accelerators, NeedsAccelerators
from tritium.errors import BadSetting, NotEnoughSlots, WrongVersion
from tritium.spark import memory
from tritium.spark.errors import WHY_LOST
from tritium.spark.inside import scheduler
from tritium.spark.inside.older import numbers
from tritium.spark.python import check, on_this_machine, unchosen
from tritium.spark.session import Session
from tritium.spark.slots import Kind, Reservations, RunSlots, kind_of, reservations

if TYPE_CHECKING:
    from pyspark.resource import TaskResourceRequests

OLDEST_SPARK = (4, 0)
OLDEST_PYTHON = (3, 10)

DYNAMIC = "spark.dynamicAllocation.enabled"
_IDLE = "spark.python.worker.idleTimeoutSeconds"
_KILL_IDLE = "spark.python.worker.killOnIdleTimeout"
_REGISTRATION = "spark.scheduler.maxRegisteredResourcesWaitingTime"
_POLL_SECONDS = 0.1  # Spark has no notification when an executor registers.

Note = Callable[[str], object]


def unheard(text: str) -> None:
    """Discard a note."""


class Needs(NeedsAccelerators, Protocol):
    """What a gang needs of a cluster: a `Gang` has these."""

    @property
    def least(self) -> int: ...
    @property
    def most(self) -> int: ...
    @property
    def cpus(self) -> int | None: ...
    @property
    def start_timeout(self) -> float: ...
    @property
    def replacement_timeout(self) -> float | None: ...


class TaskProfile(Protocol):
    """A resource profile, as `mapInArrow` reads it."""

    @property
    def id(self) -> int: ...


class Cluster:
    """The cluster behind a session. Make it with `cluster_of(spark)`."""

    executors_reach_driver: ClassVar[bool] = True
    """Whether executors connect to this process; else the coordinator is on one of them too."""
    starts_one_by_one: ClassVar[bool] = False
    """Whether the slots of a gang come one after the other, and its job has no barrier stage."""
    replacement_seconds: ClassVar[float] = 15.0
    """How long replacements of lost executors are waited for, where the gang's `replacement_timeout` is None."""
    default_cores: ClassVar[str] = "0"
    """The cores of an executor where `spark.executor.cores` is not set; 0: all of its worker."""
    leaving_limit: ClassVar[tuple[str, str]] = ("spark.executor.decommission.forceKillTimeout", "0")
    """The setting, and its default, that limits how long a decommissioned executor runs on; 0: no limit."""
    more_slots: ClassVar[str] = "spark.executor.instances, spark.executor.cores"
    """The settings by which an application has more slots."""
    why_lost: ClassVar[str] = WHY_LOST
    """A pattern of those lines about a lost executor that say why it was lost."""

    overhead_factors: ClassVar[tuple[str, ...]] = ()
    """The settings of the share of its heap that an executor may take beside it; none where nothing limits that."""
    where_it_ended: ClassVar[str] = ""
    """The sentence on where the manager says why it has ended {application}; "": it ends none."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.master = session.setting("spark.master")
        self.sleep: Callable[[float], object] = time.sleep
        """Waits so many seconds for executors. A run that may be cancelled has one that raises then."""
        self._profiles: dict[Kind, TaskProfile | None] = {}

    # ---- Before anything is submitted

    def ranks_for(self, gang: Needs, note: Note = unheard, *, again: bool = False) -> int:
        """Check the cluster, and return the world size that this gang can start with.

        Waits for executors of a young application as long as Spark itself would
        (`spark.scheduler.maxRegisteredResourcesWaitingTime`), and for replacements of lost ones: `again` (after a loss)
        up to `start_timeout`, otherwise `replacement_timeout`. Calls `note` when it waits. Raises WrongVersion (Spark,
        Python), BadSetting (dynamic allocation over Connect; idle workers that are killed) and NotEnoughSlots (with
        facts `needed` and `available`).
        """
        check_versions(self.session.version, sys.version_info[:2])
        self.check_python()
        self.check_settings()
        self.check_gpus(gang)
        self.check_cores(gang)
        for text in (
            () if again else memory.notes(self.session, self.overhead_factors, _ranks_of_an_executor(self, gang))
        ):
            note(text)
        return self.count_ranks(gang, note, again)

    def slots(self, gang: Needs) -> int | None:
        """Count the ranks of this gang that the whole cluster can run at once; None where that is not reported."""
        profile = self.profile(gang)
        if profile is not None and 0 < self.cores_of_an_executor() < (gang.cpus or 1):
            return 0  # Spark would throw.
        return scheduler.slots(self.session, profile)

    def profile(self, gang: Needs) -> TaskProfile | None:
        """Return the resource profile for `mapInArrow(…, profile=)`; None where the session's default already fits."""
        key = kind_of(gang)
        if key not in self._profiles:
            amounts = _unlike_the_sessions(self, gang)
            self._profiles[key] = self.new_profile(gang, amounts) if amounts else None
        return self._profiles[key]

    def take_slots(self, run: RunSlots, gang: Needs, ranks: int, timeout: float, note: Note = unheard) -> None:
        """Have `run` hold the slots of `ranks` ranks against other launches of this process; see `RunSlots.take`.

        Nothing is reserved where slots can't be counted, or executors have not started yet.
        """
        run.take(self.reservations(), kind_of(gang), ranks, lambda: self.slots(gang) or 0, timeout, note)

    # ---- Addresses

    def driver_host(self) -> tuple[str, str]:
        """Return the address of the driver that executors connect to, and the setting it is from; "": none."""
        setting = "spark.driver.host"
        return self.session.setting(setting) or "127.0.0.1", setting

    def driver_bind_address(self) -> str:
        """Return the address that the driver listens on; "": that which executors connect to."""
        return self.session.setting("spark.driver.bindAddress")

    def executor_hosts(self) -> list[str]:
        """List the hosts of the registered executors; empty where they are not reported, or are this machine."""
        return scheduler.executor_hosts(self.session)

    @property
    def draws_bar(self) -> bool:
        """Whether Spark draws a progress bar on this process's stderr."""
        return scheduler.draws_bar(self.session)

    # ---- Overridden by the kinds of clusters

    def count_ranks(self, gang: Needs, note: Note, again: bool) -> int:
        """Return the world size that the present slots allow. Raises NotEnoughSlots."""
        available = self.await_slots(gang, note, again)
        if available < gang.least:
            raise NotEnoughSlots(_too_few(self, gang, available), needed=gang.least, available=available)
        return min(gang.most, available)

    def to_come(self, gang: Needs, note: Note) -> bool:
        """Tell whether executors for `gang.least` ranks will come, however long that takes.

        Called again and again while they are waited for: a kind of cluster may note what they wait for.
        """
        return False

    def await_slots(self, gang: Needs, note: Note, again: bool) -> int:
        """Wait until there are `gang.most` slots, or no more are expected, and return their number.

        Expected are executors of a young application and replacements of lost ones. A gang that is started `again`, or
        whose executors are `to_come`, waits up to `start_timeout` while it has fewer than `gang.least` slots.
        """
        available = self.slots(gang) or 0
        began, young = time.monotonic(), _registration_seconds_left(self)
        replacing = self.replacement_seconds if gang.replacement_timeout is None else gang.replacement_timeout
        for_most = max(young, replacing if again or _fewer_than_before(self) else 0.0)
        certain = not _all_registered(self) and self.to_come(gang, unheard)
        for_least = max(for_most, gang.start_timeout if again or certain else 0.0)
        longest = for_least if available < gang.least else for_most
        if available < gang.most and longest:
            note(f"waiting for executors: {available} of {gang.most} slots so far, at most {longest:.0f} s")
        over = False
        while available < gang.most and not over:
            waited = time.monotonic() - began
            expected = again or _fewer_than_before(self)
            expected = expected or ((certain or waited < young) and not _all_registered(self))
            over = not expected or waited > (for_least if available < gang.least else for_most)
            self.session.refuse_stopped(self.where_it_ended)
            if not over:
                self.to_come(gang, note)
                self.sleep(_POLL_SECONDS)
            available = self.slots(gang) or 0  # Also when it is over: the last executor may have registered meanwhile.
        self.reservations().executors = self.executors()
        return available

    def allocates_dynamically(self) -> bool:
        """Tell whether dynamic allocation is on, with which Spark refuses barrier stages."""
        return self.session.setting(DYNAMIC, "false").lower() == "true"

    def executors(self) -> int:
        """Count the registered executors."""
        return scheduler.executors(self.session)

    def expected_executors(self) -> int:
        """Return how many executors a young application will have; 0 where that is not known."""
        return int(self.session.setting("spark.executor.instances", "0"))

    def check_python(self) -> None:
        """Check the workers' Python where it is on this machine; elsewhere the first task reports what it lacks."""
        if on_this_machine(self.master):
            python = self.session.spark.sparkContext.pythonExec
            if not unchosen(python):
                check(python)

    def check_settings(self) -> None:
        """Raise BadSetting for settings with which Spark would end a gang."""
        memory.check_workers(self.session)
        # 4.2 has session settings of the same meaning, which default to these.
        setting = self.session.setting
        idle = setting("spark.sql.execution.pyspark.udf.idleTimeoutSeconds", setting(_IDLE, "0"))
        kill = setting("spark.sql.execution.pyspark.udf.killOnIdleTimeout", setting(_KILL_IDLE, "false"))
        if kill.lower() == "true" and idle.strip("s") not in ("", "0"):
            raise BadSetting(
                f"With {_KILL_IDLE}=true Spark kills a Python worker that has sent nothing for {idle} s ({_IDLE}): "
                f"a gang would be killed while it trains. Set {_KILL_IDLE}=false, or {_IDLE}=0.",
                setting=_KILL_IDLE,
            )

    def check_gpus(self, gang: Needs) -> None:
        """Raise NotEnoughSlots where an executor has fewer GPUs, or other accelerators, than a rank."""
        configured = self.gpus_of_an_executor(gang) if gang.gpus else 0
        if configured >= gang.gpus:
            return
        if configured:
            setting = resource_setting("executor", gang)
            why = f"an executor has {configured} ({setting}={configured}). Ask for fewer, or use executors"
        else:
            why = f"the executors of {self.master!r} offer none. Start the session"
        raise too_few_gpus(gang, why, configured)

    def check_cores(self, gang: Needs) -> None:
        """Raise NotEnoughSlots where an executor has fewer cores than a rank."""
        cores = self.cores_of_an_executor()
        if gang.cpus and 0 < cores < gang.cpus:
            raise NotEnoughSlots(
                f"Every rank needs {gang.cpus} CPU cores (cpus={gang.cpus}), and an executor of {self.master!r} has "
                f"{cores} (spark.executor.cores). Ask for fewer, or start the session with spark.executor.cores="
                f"{gang.cpus} or more.",
                needed=gang.cpus,
                available=cores,
                setting="spark.executor.cores",
            )

    def cores_of_an_executor(self) -> int:
        """Return the cores of an executor according to the settings; 0: all cores of its worker."""
        return int(self.session.setting("spark.executor.cores", self.default_cores))

    def gpus_of_an_executor(self, gang: Needs) -> int:
        """Return the accelerators of an executor according to the settings."""
        return int(self.session.setting(resource_setting("executor", gang), "0"))

    def cores_of_a_rank(self, gang: Needs) -> int:
        """Return the cores that a rank takes of its executor."""
        return gang.cpus or int(self.session.setting("spark.task.cpus", "1"))

    def advice(self, gang: Needs) -> tuple[str, str]:
        """Return what a slot is, and how the application has more of them, for the error where there are too few."""
        cores = self.cores_of_a_rank(gang)
        more = f"give the application more executors or cores ({self.more_slots})"
        fewer = "" if gang.cpus in (None, 1) else f", or ask for fewer than cpus={gang.cpus} a rank"
        return f"{cores} CPU core(s)", more + fewer

    # ---- Details

    def new_profile(self, gang: Needs, amounts: Mapping[str, float]) -> TaskProfile:
        """Return a profile of tasks with these amounts of resources, on the executors that there are."""
        from pyspark.resource import ResourceProfileBuilder

        return ResourceProfileBuilder().require(task_requests(amounts)).build

    def reservations(self) -> Reservations:
        """Return the reservations of slots of this application."""
        return reservations(self.session.id)


def _ranks_of_an_executor(cluster: Cluster, gang: Needs) -> int:
    return max(1, min(gang.most, cluster.cores_of_an_executor() // cluster.cores_of_a_rank(gang)))


def _registration_seconds_left(cluster: Cluster) -> float:
    """Return how long executors of this application may still take to register."""
    if _all_registered(cluster):
        return 0.0
    allowed = scheduler.seconds(cluster.session, _REGISTRATION, "30s")
    return max(0.0, allowed - (time.time() - float(cluster.session.spark.sparkContext.startTime) / 1000))


def _all_registered(cluster: Cluster) -> bool:
    return 0 < cluster.expected_executors() <= cluster.executors()


def _fewer_than_before(cluster: Cluster) -> bool:
    """Tell whether this application had more executors when a gang was last started."""
    return cluster.executors() < cluster.reservations().executors


def _too_few(cluster: Cluster, gang: Needs, available: int) -> str:
    slot, more = cluster.advice(gang)
    slot += f" and {Accelerators.of(gang).counted()}" if gang.gpus else ""
    change = f"Ask for ranks={available}, or {more}" if available else more[0].upper() + more[1:]
    return (
        f"{gang.least} ranks need {gang.least} slots at once, of {slot} each; {cluster.master!r} has {available}. "
        f"{change}."
    )


def too_few_gpus(gang: Needs, why: str, configured: int) -> NotEnoughSlots:
    """Return the error for ranks that need more GPUs than an executor has."""
    setting = resource_setting("executor", gang)
    return NotEnoughSlots(
        f"Every rank needs {Accelerators.of(gang).counted()} (gpus={gang.gpus}), and {why} with {setting} set, on "
        "workers whose discovery script lists them. A gang never falls back to CPUs; gpus=0 asks for them.",
        needed=gang.gpus,
        available=configured,
        setting=setting,
    )


def _unlike_the_sessions(cluster: Cluster, gang: Needs) -> dict[str, float]:
    """Return the amounts of resources of a rank's task, by name; none where they are those of the session's tasks."""
    cpus = int(cluster.session.setting("spark.task.cpus", "1"))
    gpus = float(cluster.session.setting(resource_setting("task", gang), "0"))
    if (gang.cpus in (None, cpus)) and gang.gpus == gpus:
        return {}
    return {"cpus": gang.cpus or cpus, **({gang.accelerator: gang.gpus} if gang.gpus else {})}


def resource_setting(of: Literal["executor", "task"], gang: Needs, what: str = "amount") -> str:
    """Return the name of Spark's setting about the gang's accelerator."""
    return f"spark.{of}.resource.{gang.accelerator}.{what}"


def task_requests(amounts: Mapping[str, float]) -> TaskResourceRequests:
    """Return Spark's request of these amounts of resources, `cpus` among them, for a task."""
    from pyspark.resource import TaskResourceRequests

    requests = TaskResourceRequests().cpus(int(amounts["cpus"]))
    for name, amount in amounts.items():
        if name != "cpus":
            requests = requests.resource(name, amount)
    return requests


def check_versions(spark: str, python: Sequence[int]) -> None:
    """Raise WrongVersion when the driver's Python or the cluster's Spark is too old."""
    if tuple(python) < OLDEST_PYTHON:
        version, oldest = ".".join(map(str, python)), ".".join(map(str, OLDEST_PYTHON))
        raise WrongVersion(f"Tritium needs Python {oldest} or newer; this is {version}.", found=version, needed=oldest)
    if numbers(spark) < OLDEST_SPARK:
        oldest = ".".join(map(str, OLDEST_SPARK))
        raise WrongVersion(
            f"Tritium needs Spark {oldest} or newer; this cluster runs {spark}. "
            f"Use a cluster with Spark {oldest}, and the pyspark of the same version.",
            found=spark,
            needed=oldest,
        )

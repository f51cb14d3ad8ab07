"""The kind of cluster, its slots and GPUs, and the checks before a gang is submitted (driver).

On classic Spark the slots are counted before anything is submitted. Spark Connect does not report them: there the gang
is submitted without a count, and `start_timeout` ends a gang that could not start. Jobs of other drivers, and jobs of
this driver that are not launches, are not counted either: a gang waits for its tasks behind them.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

from tritium.errors import BadSetting, NotEnoughSlots, WrongVersion
from tritium.spark.cluster.slots import RunSlots, reservations
from tritium.spark.python import check, may_raise_limits, on_this_machine, unchosen
from tritium.spark.session import is_connect

if TYPE_CHECKING:
    from pyspark.resource import ResourceProfile

OLDEST_SPARK = (4, 1)
OLDEST_PYTHON = (3, 10)

_EXECUTOR_GPUS = "spark.executor.resource.gpu.amount"
_TASK_GPUS = "spark.task.resource.gpu.amount"
_IDLE = "spark.python.worker.idleTimeoutSeconds"
_KILL_IDLE = "spark.python.worker.killOnIdleTimeout"
_REGISTRATION = "spark.scheduler.maxRegisteredResourcesWaitingTime"
RETURN_SECONDS = 15.0  # how long replacements of lost executors are waited for
_POLL_SECONDS = 0.1  # Spark has no notification when an executor registers

Note = Callable[[str], object]


def _unheard(text: str) -> None:
    """Discard a note."""


class Needs(Protocol):
    """What a gang needs of a cluster: a `Gang` has these."""

    @property
    def least(self) -> int: ...
    @property
    def most(self) -> int: ...
    @property
    def cpus(self) -> int | None: ...
    @property
    def gpus(self) -> int: ...
    @property
    def start_timeout(self) -> float: ...


class Cluster:
    """The cluster behind a SparkSession. Make it with `Cluster.of(spark)`."""

    def __init__(self, spark: Any) -> None:
        self.spark = spark
        self.is_connect = is_connect(spark)
        self._profiles: dict[tuple[int | None, int], ResourceProfile | None] = {}
        if not self.is_connect and spark.sparkContext._jsc is None:
            raise BadSetting("This SparkSession has been stopped. Make a new one, and launch with it.")
        self.version: str = spark.version
        self.master: str = self._setting("spark.master", "")

    @classmethod
    def of(cls, spark: Any) -> Cluster:
        """Return the cluster of a classic or Connect session. Raises BadSetting for an object that is no session."""
        if not hasattr(spark, "range") or not hasattr(spark, "conf"):
            raise BadSetting(f"spark={spark!r} is no SparkSession.", setting="spark")
        return cls(spark)

    @property
    def is_local(self) -> bool:
        """Whether tasks run in the driver's JVM (`local`, `local[N]`), where Spark refuses resource profiles."""
        return self.master == "local" or self.master.startswith("local[")

    @cached_property
    def is_dynamic(self) -> bool:
        """Whether dynamic allocation is on, with which Spark refuses barrier stages."""
        return not self.is_local and self._setting("spark.dynamicAllocation.enabled", "false").lower() == "true"

    # ---- before anything is submitted

    def ranks_for(self, gang: Needs, note: Note = _unheard, *, again: bool = False) -> int:
        """Check the cluster, and return the world size that this gang can start with.

        Waits for executors of a young application as long as Spark itself would
        (`spark.scheduler.maxRegisteredResourcesWaitingTime`), and for replacements of lost ones: `again` (after a loss)
        up to `start_timeout`, otherwise RETURN_SECONDS. Calls `note` when it waits. Raises WrongVersion (Spark,
        Python), BadSetting (dynamic allocation over Connect; idle workers that are killed) and NotEnoughSlots (with
        facts `needed` and `available`).
        """
        check_versions(self.version, sys.version_info[:2])
        self._check_python()
        self._check_settings()
        self._check_gpus(gang)
        self._check_cores(gang)
        if self.is_connect:
            return gang.most
        if self.is_dynamic:
            return self._ranks_to_come(gang, note)
        available = self._slots_once_there(gang, note, again)
        if available < gang.least:
            raise NotEnoughSlots(self._too_few(gang, available), needed=gang.least, available=available)
        return min(gang.most, available)

    @property
    def draws_bar(self) -> bool:
        """Whether Spark draws a progress bar on this process's stderr."""
        return not self.is_connect and bool(self.spark.sparkContext._jsc.sc().progressBar().isDefined())

    def slots(self, gang: Needs) -> int | None:
        """Count the ranks of this gang that the whole cluster can run at once; None on Connect (not reported)."""
        if self.is_connect:
            return None
        context = self.spark.sparkContext._jsc.sc()
        manager = context.resourceProfileManager()
        profile = self.profile(gang)
        if profile is None:
            return int(context.maxNumConcurrentTasks(manager.defaultResourceProfile()))
        if 0 < self._cores_of_an_executor() < (gang.cpus or 1):
            return 0  # Spark would throw in maxNumConcurrentTasks
        manager.addResourceProfile(profile._java_resource_profile)  # Spark throws for an unregistered profile
        return int(context.maxNumConcurrentTasks(profile._java_resource_profile))

    def profile(self, gang: Needs) -> ResourceProfile | None:
        """Return the resource profile for `mapInArrow(…, profile=)`; None where the session's default already fits.

        On `local`, which refuses profiles, it is None, and `cpus` is only the number of threads of a rank.
        """
        key = (gang.cpus, gang.gpus)
        if key not in self._profiles:
            self._profiles[key] = self._make_profile(gang)
        return self._profiles[key]

    def take_slots(self, run: RunSlots, gang: Needs, ranks: int, timeout: float, note: Note = _unheard) -> None:
        """Have `run` hold the slots of `ranks` ranks against other launches of this process; see `RunSlots.take`.

        On Connect, where slots can't be counted, and under dynamic allocation, where executors have not started yet,
        nothing is reserved.
        """
        if not (self.is_connect or self.is_dynamic):
            everyone = reservations(self.spark.sparkContext.applicationId)
            run.take(everyone, (gang.cpus, gang.gpus), ranks, lambda: self.slots(gang) or 0, timeout, note)

    # ---- details

    def _setting(self, name: str, default: str) -> str:
        value = self.spark.conf.get(name, default)
        return default if value is None else str(value)

    def _check_settings(self) -> None:
        if self.is_connect and self.is_dynamic:
            raise BadSetting(
                "Over Spark Connect a gang can't start while spark.dynamicAllocation.enabled=true. Start the server "
                "with spark.dynamicAllocation.enabled=false and a number of executors (spark.executor.instances).",
                setting="spark.dynamicAllocation.enabled",
            )
        # 4.2 has session settings of the same meaning, which default to these
        idle = self._setting("spark.sql.execution.pyspark.udf.idleTimeoutSeconds", self._setting(_IDLE, "0"))
        kill = self._setting("spark.sql.execution.pyspark.udf.killOnIdleTimeout", self._setting(_KILL_IDLE, "false"))
        memory = self._setting("spark.executor.pyspark.memory", "")
        if memory and self.is_local and not may_raise_limits():
            raise BadSetting(
                f"spark.executor.pyspark.memory={memory} limits the address space of Spark's Python workers, and "
                "a rank, whose CUDA and mapped rows need more than that, would inherit it: this user may not raise it "
                "again. Start the session without that setting.",
                setting="spark.executor.pyspark.memory",
            )
        if kill.lower() == "true" and idle.strip("s") not in ("", "0"):
            raise BadSetting(
                f"With {_KILL_IDLE}=true Spark kills a Python worker that has sent nothing for {idle} s ({_IDLE}): "
                f"a gang would be killed while it trains. Set {_KILL_IDLE}=false, or {_IDLE}=0.",
                setting=_KILL_IDLE,
            )

    def _check_python(self) -> None:
        """Check the workers' Python where it is on this machine; elsewhere the first task reports what it lacks."""
        if not self.is_connect and on_this_machine(self.master):
            python = self.spark.sparkContext.pythonExec
            if not unchosen(python):
                check(python)

    def _check_gpus(self, gang: Needs) -> None:
        if not gang.gpus:
            return
        configured = int(self._setting(_EXECUTOR_GPUS, "0"))
        if configured >= gang.gpus and not self.is_local:
            return
        if self.is_local:
            why = f'{self.master!r} knows no GPUs. Use on="driver", or a cluster'
        elif configured:
            why = f"an executor has {configured} ({_EXECUTOR_GPUS}={configured}). Ask for fewer, or use executors"
        else:
            why = f"the executors of {self.master!r} offer none. Start the session"
        raise NotEnoughSlots(
            f"Every rank needs {gang.gpus} GPU{'s' * (gang.gpus > 1)} (gpus={gang.gpus}), and {why} with "
            f"{_EXECUTOR_GPUS} and {_TASK_GPUS} set, on workers whose discovery script lists GPUs. "
            "A gang never falls back to CPUs; gpus=0 asks for them.",
            needed=gang.gpus,
            available=configured,
            setting=_EXECUTOR_GPUS,
        )

    def _check_cores(self, gang: Needs) -> None:
        cores = self._cores_of_an_executor()
        if not self.is_local and gang.cpus and 0 < cores < gang.cpus:
            raise NotEnoughSlots(
                f"Every rank needs {gang.cpus} CPU cores (cpus={gang.cpus}), and an executor of {self.master!r} has "
                f"{cores} (spark.executor.cores). Ask for fewer, or start the session with spark.executor.cores="
                f"{gang.cpus} or more.",
                needed=gang.cpus,
                available=cores,
                setting="spark.executor.cores",
            )

    def _cores_of_an_executor(self) -> int:
        """Return the cores of an executor according to the settings; 0: all cores of its worker."""
        default = "1" if self.master.startswith(("yarn", "k8s")) else "0"
        return int(self._setting("spark.executor.cores", default))

    def _make_profile(self, gang: Needs) -> ResourceProfile | None:
        if self.is_local:
            return None
        cpus = int(self._setting("spark.task.cpus", "1"))
        gpus = float(self._setting(_TASK_GPUS, "0"))
        if (gang.cpus in (None, cpus)) and gang.gpus == gpus:
            return None
        from pyspark.resource import ResourceProfileBuilder, TaskResourceRequests

        requests = TaskResourceRequests().cpus(gang.cpus or cpus)
        if gang.gpus:
            requests = requests.resource("gpu", gang.gpus)
        return ResourceProfileBuilder().require(requests).build

    def _slots_once_there(self, gang: Needs, note: Note, again: bool) -> int:
        """Wait until there are `gang.most` slots, or no more are expected, and return their number.

        Expected are executors of a young application and replacements of lost ones. A gang that is started `again`
        waits for replacements up to `start_timeout` while it has fewer than `gang.least` slots.
        """
        available = self.slots(gang) or 0
        if self.is_local:
            return available
        began, young = time.monotonic(), self._registration_seconds_left()
        for_most = max(young, RETURN_SECONDS if again or self._fewer_than_before() else 0.0)
        for_least = max(for_most, gang.start_timeout if again else 0.0)
        if available < gang.most and for_most:
            longest = for_least if available < gang.least else for_most
            note(f"waiting for executors: {available} of {gang.most} slots so far, at most {longest:.0f} s")
        over = False
        while available < gang.most and not over:
            waited = time.monotonic() - began
            to_come = again or self._fewer_than_before() or (waited < young and not self._all_registered())
            over = not to_come or waited > (for_least if available < gang.least else for_most)
            if not over:
                time.sleep(_POLL_SECONDS)
            available = self.slots(gang) or 0  # also when it is over: the last executor may have registered meanwhile
        reservations(self.spark.sparkContext.applicationId).executors = self._executors()
        return available

    def _ranks_to_come(self, gang: Needs, note: Note) -> int:
        """Return the world size under dynamic allocation: as many ranks as the maximum of executors can run."""
        executors = int(self._setting("spark.dynamicAllocation.maxExecutors", "0")) or gang.most
        cores = self._cores_of_an_executor()  # 0: all of its worker, a number that is not known here
        each = max(1, cores // (gang.cpus or int(self._setting("spark.task.cpus", "1")))) if cores else gang.most
        if gang.gpus:
            each = min(each, int(self._setting(_EXECUTOR_GPUS, "0")) // gang.gpus)
        if executors * each < gang.least:
            raise NotEnoughSlots(
                f"{gang.least} ranks need {gang.least} slots at once, and with spark.dynamicAllocation.maxExecutors="
                f"{executors} there are never more than {executors * each}. Ask for ranks={executors * each}, or "
                "raise it.",
                needed=gang.least,
                available=executors * each,
                setting="spark.dynamicAllocation.maxExecutors",
            )
        note(
            "dynamic allocation: Spark starts the ranks one by one, and they begin together; slots are given back when "
            "the rest does not come"
        )
        return min(gang.most, executors * each)

    def _registration_seconds_left(self) -> float:
        """Return how long executors of this application may still take to register."""
        if self._all_registered():
            return 0.0
        context = self.spark.sparkContext
        allowed = float(context._jsc.sc().conf().getTimeAsSeconds(_REGISTRATION, "30s"))
        return max(0.0, allowed - (time.time() - float(context.startTime) / 1000))

    def _all_registered(self) -> bool:
        cluster = re.match(r"local-cluster\[\s*(\d+)", self.master)
        expected = int(cluster[1]) if cluster else int(self._setting("spark.executor.instances", "0"))
        return 0 < expected <= self._executors()

    def _fewer_than_before(self) -> bool:
        """Tell whether this application had more executors when a gang was last started."""
        return self._executors() < reservations(self.spark.sparkContext.applicationId).executors

    def _executors(self) -> int:
        """Count the executors that tasks can be given to, as `slots` does; their block managers register later."""
        return int(self.spark.sparkContext._jsc.sc().getExecutorIds().size())

    def executor_hosts(self) -> list[str]:
        """List the hosts of the registered executors; empty on Connect, which does not report them."""
        if self.is_connect:
            return []
        names = str(self.spark.sparkContext._jsc.sc().getExecutorMemoryStatus().keys().mkString(" ")).split()
        hosts = dict.fromkeys(name.rpartition(":")[0] for name in names)
        hosts.pop(self._setting("spark.driver.host", ""), None)  # the driver is among them
        return list(hosts)

    def _too_few(self, gang: Needs, available: int) -> str:
        each = "1 task" if self.is_local else f"{gang.cpus or self._setting('spark.task.cpus', '1')} CPU core(s)"
        each += f" and {gang.gpus} GPU(s)" if gang.gpus else ""
        more = {
            True: f"start Spark with more: local[{gang.least}]",
            False: "give the application more executors or cores (spark.executor.instances, spark.executor.cores, "
            "spark.cores.max)",
        }[self.is_local]
        fewer = f"Ask for ranks={available}, or " if available else ""
        change = f"{fewer}{more}" if fewer else more[0].upper() + more[1:]
        change += "" if self.is_local or gang.cpus in (None, 1) else f", or ask for fewer than cpus={gang.cpus} a rank"
        return (
            f"{gang.least} ranks need {gang.least} slots at once, of {each} each; {self.master!r} has {available}. "
            f"{change}."
        )


def check_versions(spark: str, python: Sequence[int]) -> None:
    """Raise WrongVersion when the driver's Python or the cluster's Spark is too old."""
    if tuple(python) < OLDEST_PYTHON:
        found, oldest = ".".join(map(str, python)), ".".join(map(str, OLDEST_PYTHON))
        raise WrongVersion(f"Tritium needs Python {oldest} or newer; this is {found}.", found=found, needed=oldest)
    numbers = tuple(int(part) for part in re.findall(r"\d+", spark)[:2])
    if numbers < OLDEST_SPARK:
        oldest = ".".join(map(str, OLDEST_SPARK))
        raise WrongVersion(
            f"Tritium needs Spark {oldest} or newer (DataFrame.repartitionById, arrow_udf); this cluster runs {spark}. "
            f"Use a cluster with Spark {oldest}, and the pyspark of the same version.",
            found=spark,
            needed=oldest,
        )

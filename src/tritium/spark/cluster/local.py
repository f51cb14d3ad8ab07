"""A local master, `local[N]`: tasks are threads of the driver's JVM (driver)."""

from __future__ import annotations

from tritium.errors import BadSetting
from tritium.spark.cluster.base import Cluster, Needs, Note, too_few_gpus
from tritium.spark.python import may_raise_limits

_WORKER_MEMORY = "spark.executor.pyspark.memory"


class Local(Cluster):
    """A local master, which refuses resource profiles: `cpus` is only the number of threads of a rank."""

    def profile(self, gang: Needs) -> None:
        return None

    def await_slots(self, gang: Needs, note: Note, again: bool) -> int:
        return self.slots(gang) or 0

    def allocates_dynamically(self) -> bool:
        return False

    def driver_host(self) -> tuple[str, str]:
        return "127.0.0.1", ""

    def driver_bind_address(self) -> str:
        return ""

    def executor_hosts(self) -> list[str]:
        return []

    def check_settings(self) -> None:
        super().check_settings()
        memory = self.session.setting(_WORKER_MEMORY)
        if memory and not may_raise_limits():
            raise BadSetting(
                f"{_WORKER_MEMORY}={memory} limits the address space of Spark's Python workers, and "
                "a rank, whose CUDA and mapped rows need more than that, would inherit it: this user may not raise it "
                "again. Start the session without that setting.",
                setting=_WORKER_MEMORY,
            )

    def check_gpus(self, gang: Needs) -> None:
        if gang.gpus:
            why = f'{self.master!r} knows no GPUs. Use on="driver", or a cluster'
            raise too_few_gpus(gang, why, self.gpus_of_an_executor(gang))

    def check_cores(self, gang: Needs) -> None:
        """Do nothing: a rank may have more threads than there are slots."""

    def advice(self, gang: Needs) -> tuple[str, str]:
        return "1 task", f"start Spark with more: local[{gang.least}]"

"""Dynamic allocation: executors start when tasks wait, and Spark refuses barrier stages (driver)."""

from __future__ import annotations

from collections.abc import Mapping

from tritium.accelerators import Accelerators
from tritium.errors import NotEnoughSlots
from tritium.spark.cluster.base import Cluster, Needs, Note, TaskProfile, resource_setting, task_requests, unheard
from tritium.spark.slots import RunSlots


class Dynamic(Cluster):
    """A cluster with dynamic allocation, before the class of its manager."""

    starts_one_by_one = True

    def take_slots(self, run: RunSlots, gang: Needs, ranks: int, timeout: float, note: Note = unheard) -> None:
        """Do nothing: executors have not started yet."""

    def new_profile(self, gang: Needs, amounts: Mapping[str, float]) -> TaskProfile:
        """Return a profile of executors like the application's, with tasks of these amounts.

        A profile of tasks alone that asks for accelerators would end the application: Spark looks for them in the
        executors of the profile, and stops its context where there are none.
        """
        from pyspark.resource import ExecutorResourceRequests, ResourceProfileBuilder

        builder = ResourceProfileBuilder().require(task_requests(amounts))
        if gang.gpus:
            script, vendor = (
                self.session.setting(resource_setting("executor", gang, what)) for what in ("discoveryScript", "vendor")
            )
            requests = ExecutorResourceRequests()
            number = self.gpus_of_an_executor(gang)
            builder = builder.require(requests.resource(gang.accelerator, number, script, vendor))
        return builder.build

    def count_ranks(self, gang: Needs, note: Note, again: bool) -> int:
        """Return the world size: as many ranks as the maximum of executors can run."""
        executors = int(self.session.setting("spark.dynamicAllocation.maxExecutors", "0")) or gang.most
        cores = self.cores_of_an_executor()  # 0: all of its worker, a number that is not known here.
        ranks = max(1, cores // self.cores_of_a_rank(gang)) if cores else gang.most
        if gang.gpus:
            ranks = min(ranks, Accelerators.of(gang).ranks_of(self.gpus_of_an_executor(gang)))
        most = executors * ranks
        if most < gang.least:
            raise NotEnoughSlots(
                f"{gang.least} ranks need {gang.least} slots at once, and with spark.dynamicAllocation.maxExecutors="
                f"{executors} there are never more than {most}. Ask for ranks={most}, or raise it.",
                needed=gang.least,
                available=most,
                setting="spark.dynamicAllocation.maxExecutors",
            )
        note(
            "dynamic allocation: Spark starts the ranks one by one, and they begin together; slots are given back when "
            "the rest does not come"
        )
        if gang.gpus and self.profile(gang) is not None:
            note(
                f"the session's tasks have other resources than these ranks ({Accelerators.of(gang).counted()}): Spark "
                "starts executors of their own, where workers have room beside the present ones; it refuses a barrier "
                "stage, which would start all ranks at once"
            )
        return min(gang.most, most)

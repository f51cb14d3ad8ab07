"""Clusters whose slots are not reported: those behind a Spark Connect server (driver).

A gang is submitted without a count, and `start_timeout` ends one that could not start.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from urllib.parse import urlsplit

from tritium.errors import BadSetting
from tritium.spark.cluster.base import DYNAMIC, Cluster, Needs, Note, TaskProfile, resource_setting, unheard
from tritium.spark.inside import profiles, scheduler
from tritium.spark.slots import RunSlots

_PORT = 15002  # Of a Connect server; to find a route, any would do.


class Uncounted(Cluster):
    """A cluster whose scheduler can't be asked, before the class of its manager."""

    draws_bar = False

    def count_ranks(self, gang: Needs, note: Note, again: bool) -> int:
        why = scheduler.used.why_not(self.session.spark)
        note(f"slots are not counted ({why}): start_timeout ends a gang that has too few")
        return gang.most

    def slots(self, gang: Needs) -> int | None:
        return None

    def take_slots(self, run: RunSlots, gang: Needs, ranks: int, timeout: float, note: Note = unheard) -> None:
        """Do nothing: slots can't be counted."""

    def executor_hosts(self) -> list[str]:
        return []


class Connect(Uncounted):
    """The cluster behind a Spark Connect server, before the class of its manager."""

    executors_reach_driver = False

    def count_ranks(self, gang: Needs, note: Note, again: bool) -> int:
        return gang.most

    def driver_host(self) -> tuple[str, str]:
        return route_to(self.session.spark.client.host), ""

    def driver_bind_address(self) -> str:
        return ""

    def new_profile(self, gang: Needs, amounts: Mapping[str, float]) -> TaskProfile:
        spark = self.session.spark
        if why := profiles.used.why_not(spark):
            raise BadSetting(
                f"Over Spark Connect this gang's tasks can't be of another size than the session's: {why}. Start the "
                f"server with spark.task.cpus={amounts['cpus']:g}"
                + (f" and {resource_setting('task', gang)}={gang.gpus:g}." if gang.gpus else "."),
                setting=resource_setting("task", gang) if gang.gpus else "spark.task.cpus",
            )
        return profiles.made(spark, amounts)

    def check_python(self) -> None:
        """Do nothing: it is the server's."""

    def check_settings(self) -> None:
        if self.allocates_dynamically():
            raise BadSetting(
                f"Over Spark Connect a gang can't start while {DYNAMIC}=true. Start the server "
                f"with {DYNAMIC}=false and a number of executors (spark.executor.instances).",
                setting=DYNAMIC,
            )
        super().check_settings()


def route_to(server: str) -> str:
    """Return the address of this machine that is the source of packets to `server`."""
    host = urlsplit(server if "//" in server else f"sc://{server}").hostname or "127.0.0.1"
    try:
        addresses = socket.getaddrinfo(host, _PORT, type=socket.SOCK_DGRAM)
    except OSError as error:
        raise BadSetting(
            f"The Connect server's host {host!r} is no address, and no name known here: {error}."
        ) from error
    for family, kind, _, _, address in addresses:
        with socket.socket(family, kind) as probe:
            try:
                probe.connect(address)  # Of UDP, which only looks up the route.
            except OSError:  # There is no route of this kind.
                continue
            return str(probe.getsockname()[0])
    return "127.0.0.1"

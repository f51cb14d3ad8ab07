"""Which ranks see the same GPUs, and whether each has its own (driver, or the first supervisor)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tritium.errors import BadSetting

if TYPE_CHECKING:
    from tritium.gang.coordinator.rendezvous import Member


def nodes(members: Sequence[Member]) -> list[list[Member]]:
    """The members in groups that see the same GPUs under the same addresses; local ranks are counted within a group.

    A group is a host. Where a cluster manager isolates GPUs (YARN, Kubernetes), two executors of one host see other
    GPUs under the same address: then each of them is a group. GPUs are told apart by their UUIDs, or, where no one
    knows these, by an address that comes twice.
    """
    hosts: dict[str, list[Member]] = {}
    for member in sorted(members, key=lambda m: m.partition):
        hosts.setdefault(member.host, []).append(member)
    groups: list[list[Member]] = []
    for host in hosts.values():
        addresses = [gpu for member in host for gpu in member.gpus]
        known = all(member.listed for member in host)
        if known or len(set(addresses)) < len(addresses):
            views: dict[object, list[Member]] = {}
            for member in host:
                views.setdefault(tuple(sorted(member.listed.items())) if known else member.executor, []).append(member)
            groups += views.values()
        else:
            groups.append(host)
    return groups


def uuid(member: Member, gpu: str) -> str | None:
    """The UUID of one of its GPUs, as far as it is known. An address may be one itself."""
    return gpu if gpu.startswith(("GPU-", "MIG-")) else member.listed.get(gpu)


def shared(members: Sequence[Member]) -> BadSetting | None:
    """The error that two ranks were given the same GPU, if they were."""
    owners: dict[str, tuple[Member, str]] = {}
    for member in sorted(members, key=lambda m: m.partition):
        for gpu in member.gpus:
            name = uuid(member, gpu)
            if name is None:
                continue
            other, address = owners.setdefault(name, (member, gpu))
            if other is not member:
                return BadSetting(
                    f"Tasks {other.partition} and {member.partition} were given the same GPU, {name}: it is "
                    f"{address!r} on {other.host}, and {gpu!r} on {member.host}. Every rank needs GPUs of "
                    "its own. Let each GPU be listed by one worker only (spark.worker.resource.gpu.discoveryScript), "
                    "or once in CUDA_VISIBLE_DEVICES.",
                    uuid=name,
                )
    return None

"""Assign ranks to tasks, and check that no two share a GPU (driver, or the first supervisor)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from tritium.accelerators import Accelerators
from tritium.errors import BadSetting
from tritium.gang.coordinator.members import Member


def assign_ranks(members: Sequence[Member]) -> list[Member]:
    """Assign ranks: hosts by their first partition, members of a host by GPU address, then by partition.

    Ranks of a host are consecutive, so a ring crosses each host once. Returns the members in rank order.
    """
    first: dict[str, int] = {}
    for member in sorted(members, key=lambda m: m.partition):
        first.setdefault(member.host, member.partition)
    groups = sorted(nodes(members), key=lambda group: (first[group[0].host], group[0].partition))
    gang: list[Member] = []
    for group in groups:
        neighbours = sorted(group, key=lambda m: ([_numeric(g) for g in m.gpus], m.partition))
        for local_rank, member in enumerate(neighbours):
            member.rank, member.local_rank = len(gang), local_rank
            member.neighbours = neighbours
            gang.append(member)
    return gang


def assignments(gang: Sequence[Member], accelerators: Accelerators) -> Iterator[tuple[Member, dict[str, Any]]]:
    """Yield every member with the fields of its `assign` message; visible GPUs are those of all local ranks."""
    for member in gang:
        neighbours = member.neighbours
        yield (
            member,
            {
                "rank": member.number,
                "size": len(gang),
                "local_rank": member.local_rank,
                "local_size": len(neighbours),
                "master_port": gang[0].port,
                "visible": member.visible,
                "resource": accelerators.resource,
                "sharers": accelerators.sharers,
            },
        )


def _rule(sharers: int) -> str:
    return f"{sharers} ranks share a GPU." if sharers > 1 else "Every rank needs GPUs of its own."


def _numeric(address: str) -> tuple[int, str]:
    return (int(address), "") if address.isdigit() else (1 << 30, address)


def nodes(members: Sequence[Member]) -> list[list[Member]]:
    """Group the members that see the same GPUs under the same addresses; local ranks are counted within a group.

    A group is a host. Where a cluster manager isolates GPUs (YARN, Kubernetes), executors of one host see different
    GPUs under the same address: then each executor is a group. GPUs are compared by UUID; where UUIDs are unknown, an
    address that occurs twice on a host means that they are isolated.
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
    """Return the UUID of a member's GPU, or None if unknown. The address may be a UUID itself."""
    return gpu if gpu.startswith(("GPU-", "MIG-")) else member.listed.get(gpu)


def device_problem(members: Sequence[Member], accelerators: Accelerators) -> BadSetting | None:
    """Return an error if these members can't train on the devices that they were given, else None."""
    return _lacking(members, accelerators) or shared(members, accelerators.sharers) or _of_kinds(members, accelerators)


def _lacking(members: Sequence[Member], accelerators: Accelerators) -> BadSetting | None:
    for member in members:
        if len(member.gpus) < accelerators.whole:
            return BadSetting(
                f"Spark gave task {member.partition} on {member.host} {accelerators.counted(len(member.gpus))}, and a "
                f"rank needs {accelerators.counted()} (gpus={accelerators.amount:g}). Set "
                f"spark.task.resource.{accelerators.resource}.amount={accelerators.amount:g}. A gang never falls back "
                "to CPUs.",
                setting="gpus",
            )
    return None


def _of_kinds(members: Sequence[Member], accelerators: Accelerators) -> BadSetting | None:
    """Return an error for devices of a kind that the gang must not have, or of several kinds, else None."""
    places: dict[str, list[str]] = {}
    for member in sorted(members, key=lambda m: m.partition):
        for gpu in member.gpus:
            name = str(member.facts.get(gpu, {}).get("name", ""))
            places.setdefault(name, []).append(f"{gpu!r} of task {member.partition} on {member.host}")
    if wrong := [name for name in places if not accelerators.allows(name)]:
        kinds = list(accelerators.kinds)
        where, more = places[wrong[0]][0], sum(len(places[name]) for name in wrong) - 1
        rest = f", and {more} more are of another kind" * (more > 0)
        if not wrong[0]:
            return BadSetting(
                f"gpu_type={kinds}: the kind of GPU {where} can't be read{rest}. Install nvidia-ml-py there, or put "
                "nvidia-smi on the PATH of executors.",
                setting="gpu_type",
            )
        return BadSetting(
            f"gpu_type={kinds}: GPU {where} is a {wrong[0]}{rest}. Spark chooses among all GPUs of the application: "
            "let its workers list those of that kind only, or name this one, too.",
            setting="gpu_type",
        )
    names = {name: listed for name, listed in places.items() if name}
    if len(names) > 1 and not accelerators.mixed:
        counts = "; ".join(f"{len(listed)} {name}, first {listed[0]}" for name, listed in names.items())
        return BadSetting(
            f"The gang's GPUs are of {len(names)} kinds ({counts}), and each step would wait for the slowest one. Let "
            'workers list one kind only, or train on all of them: mixed="allow".',
            setting="mixed",
        )
    return None


def shared(members: Sequence[Member], sharers: int = 1) -> BadSetting | None:
    """Return an error if more than `sharers` members were given the same GPU, else None."""
    owners: dict[str, list[tuple[Member, str]]] = {}
    for member in sorted(members, key=lambda m: m.partition):
        for gpu in member.gpus:
            name = uuid(member, gpu)
            if name is None:
                continue
            others = owners.setdefault(name, [])
            others.append((member, gpu))
            other, address = others[0]
            if len(others) > sharers:
                return BadSetting(
                    f"Tasks {other.partition} and {member.partition} were given the same GPU, {name}: it is "
                    f"{address!r} on {other.host}, and {gpu!r} on {member.host}. {_rule(sharers)} Let each GPU be "
                    "listed by one worker only (spark.worker.resource.gpu.discoveryScript), or once in "
                    "CUDA_VISIBLE_DEVICES.",
                    uuid=name,
                )
    return None

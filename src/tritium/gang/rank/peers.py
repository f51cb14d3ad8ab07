"""The ranks of a gang as data, and the interface by which a world reaches them (rank)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from tritium.checkpoint import control
from tritium.gang.rank.progress_page import ProgressWriter
from tritium.observe.stored import Piece

if TYPE_CHECKING:
    from tritium.data.shard import Shard
    from tritium.tls import Certificate


@dataclass(frozen=True)
class Device:
    """An accelerator of a rank.

    address : by which Spark has assigned it: a number, or a UUID.
    name    : of its kind, as `NVIDIA H100 80GB HBM3`; "" where it is not known, as of all but NVIDIA's GPUs.
    memory  : bytes; None where nvidia-ml-py is not installed.
    uuid    : of the GPU, or of the part of it that is assigned (MIG).
    driver  : its version; "" where nvidia-ml-py is not installed.
    """

    address: str
    name: str = ""
    memory: int | None = None
    uuid: str = ""
    driver: str = ""


@dataclass(frozen=True)
class Peer:
    """One rank of the gang, as every rank knows it (compare `BarrierTaskContext.getTaskInfos`).

    device  : the first of its devices as libraries name it, `cuda:1`; "cpu" without any.
    devices : its own accelerators.
    """

    rank: int
    host: str
    address: str
    local_rank: int
    device: str
    pid: int
    devices: tuple[Device, ...] = ()


class WorldControl(control.Control, Protocol):
    """How a world reaches the rest of its gang: RankControl, HereControl or Elsewhere."""

    progress: ProgressWriter
    certificate: Certificate | None
    """That by which the run's connections are encrypted, with its key; None: they are not."""
    store_limit: int | None
    """Bytes of all files that can be stored in this run; None: no limit."""

    def store(self, piece: Piece) -> None: ...
    def shard(self, name: str) -> Shard: ...


def peers_of(descriptions: Sequence[Mapping[str, Any]]) -> tuple[Peer, ...]:
    """Make peers from their descriptions in an assignment."""
    return tuple(
        Peer(**{**{k: d[k] for k in Peer.__dataclass_fields__}, "devices": tuple(Device(**f) for f in d["devices"])})
        for d in descriptions
    )

"""What every supervisor of a run is told (any process)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tritium.gang.stall_limit import StallLimit

if TYPE_CHECKING:
    from tritium.data.schema import Field


@dataclass(frozen=True, kw_only=True)
class Order:
    """Made on the driver, sent by value."""

    launch: str
    run_id: str
    size: int
    address: tuple[str, int]
    secret: bytes
    job: bytes
    env: Mapping[str, str]
    cpus: int | None = None
    gpus: int = 0
    framework: str | None = None
    plan: Mapping[str, tuple[Field, ...]] = field(default_factory=dict)
    sorted: bool = True
    streams: bool = False
    prepared: Mapping[str, str | bool] = field(default_factory=dict)
    user_code: bytes = b""
    elastic: bool = False
    trace: bool = False
    result_limit: int = 0
    """Bytes of all results together, where the coordinator's notes travel with them; 0: any number."""
    stall_limit: StallLimit | None = None
    run_dir: str = ""

"""The order that every supervisor of an attempt gets (any process)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tritium.accelerators import NONE, Accelerators
from tritium.gang.stall_limit import StallLimit

if TYPE_CHECKING:
    from tritium.data.schema import Field
    from tritium.frameworks.framework import Framework
    from tritium.gang.packages import Packages
    from tritium.tls import Certificate


@dataclass(frozen=True, kw_only=True)
class Order:
    """The facts by which a supervisor runs its rank. Made on the driver, and pickled with the Spark job."""

    launch: str
    run_id: str
    size: int
    address: tuple[str, int]
    secret: bytes
    certificate: Certificate | None = None
    """That by which the run's connections are encrypted, with its key; None: they are not."""
    job: bytes
    env: Mapping[str, str]
    env_above_0: Mapping[str, str] = field(default_factory=dict)
    """Variables of the ranks above 0, in place of those of `env`."""
    cpus: int | None = None
    accelerators: Accelerators = NONE
    framework: Framework | None = None
    plan: Mapping[str, tuple[Field, ...]] = field(default_factory=dict)
    sorted: bool = True
    streams: bool = False
    deals_few: bool = False
    """Whether few rows are dealt again, evenly, when all ranks have theirs: see `tritium.data.few`."""
    prepared: Mapping[str, str | bool] = field(default_factory=dict)
    user_code: bytes = b""
    packages: Packages | None = None
    elastic: bool = False
    trace: bool | str = False
    result_limit: int = 0
    """Bytes that Spark accepts for all results together, with the log of a coordinator on an executor; 0: any."""
    stall_limit: StallLimit | None = None
    run_dir: str = ""
    imports: Sequence[str] = ()
    """Modules of Tritium that the ranks use: imported with the framework, before ranks are forked."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Packages that stand for modules of Tritium, see `tritium.aliases`."""

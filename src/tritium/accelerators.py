"""`Accelerators`: which devices each rank of a gang has (any process)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

GPU = "gpu"


class NeedsAccelerators(Protocol):
    """What a gang says of its ranks' accelerators: a `Gang` has these."""

    @property
    def gpus(self) -> float: ...
    @property
    def accelerator(self) -> str: ...
    @property
    def gpu_type(self) -> str | Sequence[str] | None: ...
    @property
    def mixed(self) -> str: ...


@dataclass(frozen=True, kw_only=True)
class Accelerators:
    """The accelerators of every rank; false where ranks have none.

    amount   : devices of a rank, whole or a fraction of one.
    resource : their name in Spark, as in `spark.executor.resource.<name>.amount`.
    kinds    : the names of those that the gang may have, as `H100`; any where there is none.
    mixed    : whether a gang may have several kinds.
    """

    amount: float = 0
    resource: str = GPU
    kinds: tuple[str, ...] = ()
    mixed: bool = False

    @classmethod
    def of(cls, gang: NeedsAccelerators) -> Accelerators:
        """Return those that the settings ask for."""
        kinds = (gang.gpu_type,) if isinstance(gang.gpu_type, str) else tuple(gang.gpu_type or ())
        return cls(amount=gang.gpus, resource=gang.accelerator, kinds=kinds, mixed=gang.mixed == "allow")

    def __bool__(self) -> bool:
        return self.amount > 0

    @property
    def whole(self) -> int:
        """How many devices a rank sees as its own: 1 also where it shares that one."""
        return max(1, int(self.amount)) if self else 0

    @property
    def sharers(self) -> int:
        """How many ranks share a device, as Spark counts them; 1: none does."""
        return int(1 / self.amount) if 0 < self.amount < 1 else 1

    def ranks_of(self, devices: int) -> int:
        """Return how many ranks so many devices are enough for."""
        return devices * self.sharers // self.whole

    def of_rank(self, addresses: Sequence[str], index: int) -> tuple[str, ...]:
        """Return the addresses of the `index`-th rank of a machine with these."""
        first = index // self.sharers * self.whole
        return tuple(addresses[first : first + self.whole])

    def allows(self, name: str) -> bool:
        """Return whether a device of this name may be the gang's: `A10` is none of `NVIDIA A100-SXM4-80GB`."""
        words = (rf"(?<![a-z0-9]){re.escape(kind.lower())}(?![a-z0-9])" for kind in self.kinds)
        return not self.kinds or any(re.search(word, name.lower()) for word in words)

    def device(self, index: int) -> str:
        """Return the name of the device of this index among those that a rank can see: `cuda:1`, `npu:1`."""
        return f"{'cuda' if self.resource == GPU else self.resource}:{index}"

    def counted(self, amount: float | None = None) -> str:
        """Return a number of them, by default that of a rank, as messages write it: `2 GPU(s)`, `1 npu`."""
        number = self.amount if amount is None else amount
        return f"{number:g} {'GPU(s)' if self.resource == GPU else self.resource}"


NONE = Accelerators()

"""`import tritium.flyte` is the door to `tritium_flyte`, a distribution of its own: tasks of Flyte (any process)."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from tritium import aliases

if TYPE_CHECKING:
    from tritium_flyte import *  # noqa: F403 - type checkers do not see what `sys.modules` gets below.

try:
    import tritium_flyte
except ModuleNotFoundError as error:
    if error.name != "tritium_flyte":
        raise
    raise ModuleNotFoundError(
        'tritium.flyte is in a distribution of its own, which is not installed: pip install "tritium[flyte]".',
        name="tritium_flyte",
    ) from None

sys.modules[__name__] = tritium_flyte
aliases.add({__name__: "tritium_flyte"})

"""`import tritium.compat` lets code written for other libraries run where those are not installed (any process).

It is the door to `tritium_compat`, a distribution of its own: `tritium.compat.horovod.torch` is the module
`tritium_compat.horovod.torch`, and `import horovod.torch` imports it, too, in this process and in the ranks of every
launch.
"""

from __future__ import annotations

import sys

from tritium import aliases

try:
    import tritium_compat
except ModuleNotFoundError as error:
    if error.name != "tritium_compat":
        raise
    raise ModuleNotFoundError(
        'tritium.compat is in a distribution of its own, which is not installed: pip install "tritium[compat]".',
        name="tritium_compat",
    ) from None

sys.modules[__name__] = tritium_compat
aliases.add({__name__: "tritium_compat"})
tritium_compat.activate()

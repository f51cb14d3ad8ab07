"""What the `elastic` modules of Horovod's front ends share: states that are committed, and `run` (rank).

Horovod keeps the processes that are left after a loss. Tritium starts all ranks again, from the first line of their
function; `run` then continues from the last commit that was written to the run directory.
"""

from tritium_compat.horovod.elastic.run import run_fn
from tritium_compat.horovod.elastic.state import ObjectState, State

__all__ = ["ObjectState", "State", "run_fn"]

"""What a package needs that lets programs of another library run on Tritium, as `tritium_compat` does (any process).

Public beside `tritium` and `tritium.errors`, as are its modules `keras`, `spark` and `command`. A command of such a
package is an entry point of the group `tritium.commands`: `tritium NAME` runs it.
"""

from __future__ import annotations

from tritium.aliases import active as active_aliases
from tritium.aliases import add as add_aliases
from tritium.aliases import installed
from tritium.checkpoint.code import code_of
from tritium.frameworks.at_import import before_import
from tritium.gang.program import Program
from tritium.gang.rank.mpirun import join_mpirun
from tritium.hints import suggest
from tritium.ship import pickle as pickle_by_value
from tritium.ship import pickle_from_rank
from tritium.triton_first import import_triton

__all__ = [
    "Program",
    "active_aliases",
    "add_aliases",
    "before_import",
    "code_of",
    "import_triton",
    "installed",
    "join_mpirun",
    "pickle_by_value",
    "pickle_from_rank",
    "suggest",
]

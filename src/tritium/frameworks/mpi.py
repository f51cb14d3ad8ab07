"""Refuse MPI in a gang of several ranks, which it can't start yet (rank)."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from tritium.errors import BadSetting

MODULE = "mpi4py.MPI"  # its import calls MPI_Init; that of mpi4py alone does not


def refuse(size: int) -> None:
    """Let every later import of `mpi4py.MPI` raise BadSetting; raise it now if that is imported already.

    No mpirun has started this process, so MPI_Init would silently make it a world of one, and each of `size` ranks
    would train a model of its own. The error is no ImportError, which many libraries take for "not installed".
    `find_spec`, and an import of mpi4py without its MPI, still work.
    """
    if MODULE in sys.modules:
        raise _problem(size)
    sys.meta_path.insert(0, _Finder(size))


def _problem(size: int) -> BadSetting:
    return BadSetting(
        f"mpi4py can't be used in a gang of {size} ranks: no mpirun has started them, so MPI.COMM_WORLD would be a "
        "world of one in every rank. Use torch.distributed (its environment is set), or tritium.world().gather() and "
        ".barrier(); or ranks=1; or run the function under mpirun, without launch: tritium.world() uses mpi4py there.",
        setting="ranks",
    )


class _Finder(MetaPathFinder):
    def __init__(self, size: int) -> None:
        self._size = size

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != MODULE:
            return None
        for finder in [finder for finder in sys.meta_path if finder is not self]:
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                spec.loader = _Refusing(self._size)
                return spec
        return None


class _Refusing(Loader):
    """Raises when the module is loaded; finding it works, as libraries check whether it is installed."""

    def __init__(self, size: int) -> None:
        self._size = size

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        raise _problem(self._size)

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: never called, as `create_module` raises."""

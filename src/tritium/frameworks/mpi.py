"""MPI: connect the ranks for MPI_Init, and refuse mpi4py in a gang that was not started for it (rank)."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from tritium.errors import BadSetting
from tritium.frameworks.framework import Framework, Place

MODULE = "mpi4py.MPI"  # Its import calls MPI_Init; that of mpi4py alone does not.
DESCRIPTOR = "PMI_FD"


@dataclass(frozen=True, kw_only=True)
class MPI(Framework):
    """MPI: mpi4py, and compiled programs, form MPI_COMM_WORLD of the ranks, without mpirun and SSH.

    For MPI libraries that speak PMI-1: MPICH and those that are made of it. A rank's MPI library asks its supervisor
    for the others, over a socket that it inherits.
    """

    name = "mpi"
    modules = ()  # A compiled program needs no mpi4py.
    covers = ("mpi4py",)
    install = "mpi4py mpich"
    pmi = True
    secondary = re.compile(
        r"^Exception: .*(connection|process failed|communication error|ucx function returned)", re.I | re.S
    )

    def run(self, place: Place, function: Callable[[], Any]) -> Any:
        """Call the function, then MPI_Finalize if it has initialized MPI: all ranks are needed for it."""
        os.environ.update(PMI_RANK=str(place.rank), PMI_SIZE=str(place.size))
        os.environ.setdefault("MPIR_CVAR_ENABLE_GPU", "0")  # Else MPI_Init looks for CUDA.
        if "GLOO_SOCKET_IFNAME" in os.environ:  # By it the hosts reach each other.
            for name in ("FI_TCP_IFACE", "MPIR_CVAR_CH4_OFI_IFNAME", "UCX_NET_DEVICES"):
                os.environ.setdefault(name, os.environ["GLOO_SOCKET_IFNAME"])
        result = function()
        library: Any = sys.modules.get(MODULE)
        if library is not None and library.Is_initialized() and not library.Is_finalized():
            library.Finalize()
        return result


def refuse(size: int) -> None:
    """Let every later import of `mpi4py.MPI` raise BadSetting; raise it now if that is imported already.

    MPI_Init would silently make each process a world of one, and each of `size` ranks would train a model of its own.
    The error is no ImportError, which many libraries take for "not installed". `find_spec`, and an import of mpi4py
    without its MPI, still work.
    """
    if MODULE in sys.modules:
        raise _problem(size)
    sys.meta_path.insert(0, _MPIFinder(size))


def _problem(size: int) -> BadSetting:
    return BadSetting(
        f"mpi4py can't be used in a gang of {size} ranks that was not started for MPI: MPI.COMM_WORLD would be a world "
        'of one in every rank. Launch with framework="mpi"; or use torch.distributed (its environment is set), or '
        "tritium.world().gather() and .barrier().",
        setting="framework",
    )


class _MPIFinder(MetaPathFinder):
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

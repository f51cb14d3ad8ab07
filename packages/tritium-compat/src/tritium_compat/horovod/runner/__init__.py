"""`horovod.runner`: `run`, processes of this machine (driver)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tritium_compat import jobs

_HOSTS = "its ranks are processes of this machine. Run them on a cluster by horovod.spark.run or tr.launch."
_MPI = "ranks find each other without MPI. Leave it out."
_REFUSED = {
    **dict.fromkeys(("hosts", "hostfile", "host_discovery_script", "ssh_port", "ssh_identity_file", "slots"), _HOSTS),
    **dict.fromkeys(("use_mpi", "mpi_args"), _MPI),
    "output_filename": "the output of each rank is kept in the run directory. Leave it out.",
    "executable": "ranks run this Python. Leave it out.",
}


def run(
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int = 1,
    min_num_proc: int | None = None,
    max_num_proc: int | None = None,
    start_timeout: float | None = None,
    reset_limit: int | None = None,
    verbose: Any = None,
    use_gloo: Any = None,
    np: int | None = None,
    **more: Any,
) -> list[Any]:
    """Call a function in `num_proc` processes of this machine, connected for Horovod. Returns their results."""
    jobs.refuse("horovod.run", more, _REFUSED)
    settings: dict[str, Any] = {} if start_timeout is None else {"start_timeout": float(start_timeout)}
    if reset_limit is not None:
        settings |= {"retries": reset_limit, "env": {"TRITIUM_RESET_LIMIT": str(reset_limit)}}
    count = np or num_proc
    ranks = (min_num_proc, max_num_proc or count) if min_num_proc else count
    return jobs.run(func, ranks, local=True, args=args, kwargs=kwargs, framework="horovod", **settings)


__all__ = ["run"]

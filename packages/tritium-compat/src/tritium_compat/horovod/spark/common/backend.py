"""`Backend` and `SparkBackend`: what runs the function that trains (driver)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tritium_compat import jobs
from tritium_compat.horovod.spark import runner
from tritium_compat.horovod.spark.common.training import Training


def default_num_proc() -> int:
    """Return how many tasks Spark runs at once."""
    return jobs.slots()


class Backend:
    """The interface of what runs the function that trains, on all ranks.

    The rows reach a `SparkBackend`, and what derives from it, from Spark. Any other backend reads them from the store,
    to which they are written as Parquet for it.
    """

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        env: Mapping[str, str] | None = None,
    ) -> list[Any]:
        """Call `fn(*args, **kwargs)` on every rank, and return the results in the order of ranks."""
        raise NotImplementedError

    def num_processes(self) -> int:
        """Return the number of ranks."""
        raise NotImplementedError


class SparkBackend(Backend):
    """Runs the function as tasks of Spark.

    num_proc : ranks; None: as many as Spark has slots.
    env : variables of the ranks' environment.
    options : those of `horovod.spark.run`: start_timeout, stdout, stderr, verbose, nics, …
    """

    def __init__(self, num_proc: int | None = None, env: Mapping[str, str] | None = None, **options: Any) -> None:
        self._num_proc = num_proc or default_num_proc()
        self._env = env
        self._options = runner.checked(options)

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        env: Mapping[str, str] | None = None,
    ) -> list[Any]:
        """Call `fn(*args, **kwargs)` in Spark tasks, and return the results in the order of ranks."""
        variables = {**(self._env or {}), **(env or {})}
        variables.pop("CUDA_VISIBLE_DEVICES", None)  # set on the driver to keep it off the GPUs
        more: dict[str, Any] = {}
        if isinstance(fn, Training):
            more = {"data": fn.data(), "framework": fn.framework()}
        return runner.start(fn, self._num_proc, args=args, kwargs=kwargs, env=variables, **{**self._options, **more})

    def num_processes(self) -> int:
        """Return the number of ranks."""
        return self._num_proc

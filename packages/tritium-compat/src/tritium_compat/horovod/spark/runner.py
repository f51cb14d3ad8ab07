"""A function that uses Horovod, as tasks of Spark (driver)."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from typing import Any

from tritium_compat import jobs

_MPI = "ranks find each other without MPI. Leave it out."
_REFUSED = {"use_mpi": _MPI, "extra_mpi_args": _MPI, "executable": "executors' own Python is used. Leave it out."}


def run(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
    start_timeout: float | None = None,
    use_mpi: Any = None,
    use_gloo: Any = None,
    extra_mpi_args: Any = None,
    env: Mapping[str, str] | None = None,
    stdout: Any = None,
    stderr: Any = None,
    verbose: int = 1,
    nics: Iterable[str] | None = None,
    prefix_output_with_timestamp: bool = False,
    executable: str | None = None,
) -> list[Any]:
    """Call `fn(*args, **kwargs)` in `num_proc` Spark tasks at once, connected for Horovod. Returns their results.

    num_proc : None: as many as Spark has slots (`spark.default.parallelism`).
    start_timeout : seconds; None: HOROVOD_SPARK_START_TIMEOUT, or 600.
    stdout, stderr : where the output of the ranks goes; None: that of this process.
    verbose : 0 shows no progress.
    nics : the network interfaces by which ranks may reach each other.
    """
    given = {"use_mpi": use_mpi, "extra_mpi_args": extra_mpi_args, "executable": executable}
    jobs.refuse("horovod.spark.run", given, _REFUSED)
    return start(
        fn,
        num_proc or jobs.slots(),
        args=args,
        kwargs=kwargs,
        start_timeout=start_timeout,
        env=env,
        stdout=stdout,
        stderr=stderr,
        verbose=verbose,
        nics=nics,
    )


def start(
    fn: Callable[..., Any],
    ranks: int | tuple[int, int],
    *,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    start_timeout: float | None = None,
    env: Mapping[str, str] | None = None,
    stdout: Any = None,
    stderr: Any = None,
    verbose: int = 1,
    nics: Iterable[str] | None = None,
    framework: Any = "horovod",
    **more: Any,
) -> list[Any]:
    """Call the function in Spark tasks. `more` are settings of `tr.launch`, such as `data`."""
    settings = _settings(start_timeout, env, verbose, nics)
    with _into(stdout, stderr):
        return jobs.run(fn, ranks, args=args, kwargs=kwargs, framework=framework, **settings, **more)


def checked(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of `run`'s options that `start` takes. Raises BadSetting for those that are refused."""
    known = ("start_timeout", "use_mpi", "use_gloo", "extra_mpi_args", "executable", "prefix_output_with_timestamp")
    unknown = [name for name in options if name not in (*known, "stdout", "stderr", "verbose", "nics")]
    if unknown:
        raise TypeError(f"SparkBackend() got an unexpected keyword argument {unknown[0]!r}")
    jobs.refuse("SparkBackend", options, _REFUSED)
    return {name: value for name, value in options.items() if name not in known[1:]}


def run_elastic(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
    min_num_proc: int | None = None,
    max_num_proc: int | None = None,
    start_timeout: float | None = None,
    elastic_timeout: float | None = None,
    reset_limit: int | None = None,
    env: Mapping[str, str] | None = None,
    stdout: Any = None,
    stderr: Any = None,
    verbose: int = 1,
    nics: Iterable[str] | None = None,
    prefix_output_with_timestamp: bool = False,
    min_np: int | None = None,
    max_np: int | None = None,
) -> list[Any]:
    """As `run`, with as many ranks as there are slots for, from `min_num_proc` to `max_num_proc`.

    reset_limit : how often the ranks are started again after a loss; None: 3.
    elastic_timeout : not needed: ranks start again within `start_timeout`.
    """
    most = max_num_proc or max_np or num_proc or jobs.slots()
    least = min(min_num_proc or min_np or num_proc or most, most)
    if reset_limit is not None:
        env = {**(env or {}), "TRITIUM_RESET_LIMIT": str(reset_limit)}
    return start(
        fn,
        most if least == most else (least, most),
        args=args,
        kwargs=kwargs,
        start_timeout=start_timeout,
        env=env,
        stdout=stdout,
        stderr=stderr,
        verbose=verbose,
        nics=nics,
        retries=3 if reset_limit is None else reset_limit,
    )


def _settings(
    start_timeout: float | None, env: Mapping[str, str] | None, verbose: int, nics: Iterable[str] | None
) -> dict[str, Any]:
    if start_timeout is None:
        start_timeout = float(os.environ.get("HOROVOD_SPARK_START_TIMEOUT", "600"))
    variables = dict(env or {})
    if nics:
        variables.setdefault("GLOO_SOCKET_IFNAME", ",".join(sorted(nics)))
    return {"start_timeout": float(start_timeout), "env": variables, "progress": verbose > 0}


@contextmanager
def _into(stdout: Any, stderr: Any) -> Iterator[None]:
    with ExitStack() as stack:
        if stdout is not None:
            stack.enter_context(redirect_stdout(stdout))
        if stderr is not None:
            stack.enter_context(redirect_stderr(stderr))
        yield

"""`launch` and `submit`: run a function on every rank of a gang (driver)."""

from __future__ import annotations

import importlib
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from inspect import signature
from typing import TYPE_CHECKING, Any

from tritium import frameworks
from tritium.data.schema import Data
from tritium.errors import BadSetting, TritiumWarning
from tritium.frameworks import torch as pytorch
from tritium.gang.driver import programs, trackers
from tritium.gang.driver.attempt import Attempt
from tritium.gang.driver.function_check import inspect
from tritium.gang.driver.recorder import Recorder
from tritium.gang.driver.run import Run
from tritium.gang.packages import Packages
from tritium.gang.settings import Gang, showing
from tritium.observe.run_directory import new_run_dir
from tritium.observe.runs import growth
from tritium.observe.trace import profiled

if TYPE_CHECKING:
    from typing_extensions import Unpack  # Type checkers bring it along; it is not a dependency.

    from tritium.data.exchange import Exchange
    from tritium.events import Event
    from tritium.gang.keywords import GangKeywords


@showing(Gang)
def launch(
    fn: Callable[..., Any] | str | os.PathLike[str],
    gang: Gang | None = None,
    *,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    data: Mapping[str, Any] | Exchange | None = None,
    spark: Any = None,
    **fields: Unpack[GangKeywords],
) -> list[Any]:
    """Run `fn(*args, **kwargs)` on every rank of a gang, and return one value per rank, in rank order.

    fn    : any picklable function. It need not know Tritium; `tritium.world()` tells it its rank and gives it its rows.
            Or the path of a Python script or of an executable program, or the name of a module, with its arguments in
            `args`: it runs as it is, and its results are None.
    gang  : the settings of the gang. They can be given directly as keywords: `launch(train, ranks=4, gpus=1)`.
    data  : named DataFrames, `{"train": df}`, or `tritium.Data` to say how columns are read. Every row goes to one
            rank, which reads it with `tritium.world().shard("train")`. pandas and Arrow tables are taken with
            `on="driver"` and `on="here"`.
    spark : the session; None takes the active one.

    Raises SetupError before anything has started (settings, function, data, slots, versions); StartTimeout when not
    every rank has started within `start_timeout`, and none is left; DataError for a value that can't be trained on, or
    a shard without rows; RankFailed when a rank raised (then its exception is the `__cause__`) or was lost (killed,
    left, cut off) more than `retries` times, and the others have been ended.
    """
    if callable(fn):
        _refuse_arguments(fn, fields)
    return start(fn, Gang.of(gang, fields), args=args, kwargs=kwargs, data=data, spark=spark).result()


def _refuse_arguments(fn: Callable[..., Any], fields: Mapping[str, Any]) -> None:
    """Raise BadSetting for a keyword that is no setting of a gang, but a parameter of `fn`."""
    unknown = [name for name in fields if name not in Gang.fields()]
    try:
        meant = [name for name in unknown if name in signature(fn).parameters]
    except (TypeError, ValueError):  # It is not callable, or written in C.
        return
    if meant:
        listed = ", ".join(f"{name!r}: …" for name in meant)
        raise BadSetting(
            f"There is no setting {meant[0]!r} of a gang, but the function has a parameter of that name. Pass it as "
            f"kwargs={{{listed}}}.",
            setting=meant[0],
        )


@showing(Gang)
def submit(
    fn: Callable[..., Any] | str | os.PathLike[str],
    gang: Gang | None = None,
    *,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    data: Mapping[str, Any] | Exchange | None = None,
    spark: Any = None,
    **fields: Unpack[GangKeywords],
) -> Run:
    """Do as `launch`, without waiting: check everything, start the run in a thread, and return its handle.

        with tr.submit(train, ranks=2) as run:
            for event in run.events():
                if isinstance(event, tr.events.Logged):
                    print(event.epoch, event.values)
            results = run.result()

    Raises SetupError for errors that `launch` finds before it asks the cluster; `Run.result` raises all others.
    """
    if callable(fn):
        _refuse_arguments(fn, fields)
    run = prepared(fn, Gang.of(gang, fields), args=args, kwargs=kwargs, data=data, spark=spark, stacklevel=3)
    run.start()
    return run


def start(
    fn: Callable[..., Any] | str | os.PathLike[str],
    gang: Gang,
    *,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    data: Mapping[str, Any] | Exchange | None = None,
    spark: Any = None,
    notes: Sequence[str] = (),
    title: str = "",
    training: Mapping[str, Any] | None = None,
    describe: Callable[[list[Any]], Event] | None = None,
) -> Run:
    """Do as `launch`, in this thread, and return the run that has succeeded.

    notes    : lines for the user, shown first.
    title    : tells this run from others in the progress display.
    training : an estimator's settings, as the report shows them.
    describe : returns an event about the results, which is recorded before the run ends.
    """
    facts: dict[str, Any] = {"notes": notes, "title": title, "training": training}
    run = prepared(fn, gang, args=args, kwargs=kwargs, data=data, spark=spark, stacklevel=4, **facts)
    run.describe = describe
    run.complete()
    return run


def prepared(
    fn: Callable[..., Any] | str | os.PathLike[str],
    gang: Gang,
    *,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    data: Mapping[str, Any] | Exchange | None,
    spark: Any,
    notes: Sequence[str] = (),
    title: str = "",
    training: Mapping[str, Any] | None = None,
    stacklevel: int,
) -> Run:
    """Check all that can be checked without the cluster, and return a run that has not started.

    stacklevel : that of the user's code, for warnings, as `warnings.warn` counts from here.
    """
    if isinstance(fn, str | os.PathLike):
        fn, gang = programs.find(os.fspath(fn), args, kwargs or {}, gang)
        args = ()
    if not callable(fn):
        raise BadSetting(f"launch takes a function, not {fn!r}. Pass it without calling it: launch(train, …).")
    refuse_arguments(fn, args, kwargs or {})
    for warning in inspect(fn, tuple(args), dict(kwargs or {}), gang.py_files):
        warnings.warn(warning, TritiumWarning, stacklevel=stacklevel)
    frames, exchange = _frames(data, gang)
    framework = frameworks.find(gang.framework)
    if data and framework is not None and framework.no_rows:
        raise BadSetting(framework.no_rows, setting="data")
    if profiled(gang.trace) and not data:
        raise BadSetting(
            f"trace={gang.trace!r} profiles steps, which are the batches of world.shard(name), and this launch has no "
            "data=. Give it the rows as data={'train': df}, or use torch.profiler in the function.",
            setting="trace",
        )
    imports = programs.imports(fn, (*args, *(kwargs or {}).values()), gang.py_files)
    if gang.most > 1 and (unnamed := frameworks.unnamed(framework, imports)):
        warnings.warn(unnamed, TritiumWarning, stacklevel=stacklevel)
    tensors = (framework is not None and framework.tensors) or imports("torch")
    if (tensors or (framework is not None and framework.float32)) and exchange is None:
        frames = {name: pytorch.reading(frame) for name, frame in frames.items()}
    packages = Packages.read(gang.env_packages)
    notes = (*notes, *growth(gang.run_dir))
    run_id, run_dir = new_run_dir(gang.run_dir)
    recorder = Recorder(run_id, run_dir, gang, sorted(frames), notes, title, training)
    attempt = Attempt(fn, args, kwargs or {}, gang, frames, exchange, spark, run_id, recorder, gang.most)
    return Run(replace(attempt, tensors=tensors, trackers=trackers.variables(), packages=packages))


def refuse_arguments(fn: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]) -> None:
    """Raise BadSetting when, by its signature, the function can't be called with these arguments."""
    if isinstance(args, str | bytes) or not isinstance(args, Sequence):
        raise BadSetting(f"args={args!r:.80} must be a list or tuple of arguments, such as args=({args!r:.80},).")
    try:
        known = signature(fn)
    except (TypeError, ValueError):  # Some functions that are written in C have no signature.
        return
    try:
        known.bind(*args, **kwargs)
    except TypeError as error:
        name = getattr(fn, "__name__", type(fn).__name__)
        raise BadSetting(
            f"{name}{known} can't be called: {error}. It gets args=, which holds {len(args)}, and kwargs=, which holds "
            f"{', '.join(map(repr, kwargs)) or 'nothing'}; rows come from tritium.world().shard(name)."
        ) from None


def _frames(data: Mapping[str, Any] | Exchange | None, gang: Gang) -> tuple[dict[str, Data], Exchange | None]:
    if data is None:
        return {}, None
    if not isinstance(data, Mapping):
        exchange_type = importlib.import_module("tritium.data.exchange").Exchange
        if not isinstance(data, exchange_type):
            raise BadSetting(f'data={type(data).__name__} must be a mapping of names: data={{"train": df}}.')
        if not data.ranks == gang.least == gang.most:
            raise BadSetting(f"This exchange deals to {data.ranks} ranks, and the gang has {gang.ranks}.")
        return dict(data.data), data
    frames = {}
    for name, frame in data.items():
        if not isinstance(name, str) or not name.isidentifier():
            raise BadSetting(f"data={{{name!r}: …}}: a name of a shard must be an identifier, such as 'train'.")
        frames[name] = frame if isinstance(frame, Data) else Data(frame)
    return frames, None

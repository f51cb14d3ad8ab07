"""The models that stay in a process which scores (Spark's Python worker, engine process)."""

from __future__ import annotations

import copy
import functools
import gc
import pickle
import socket
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from weakref import WeakValueDictionary

from tritium import frameworks
from tritium.errors import TritiumError, WrongVersion
from tritium.frameworks.at_import import before_import, without_collections
from tritium.frameworks.framework import Framework
from tritium.model.calls import Computing
from tritium.model.engine import Buffer, Engine
from tritium.model.engines import registry
from tritium.triton_first import import_triton

_MODELS_KEPT = 4  # A stream uses the same model in each micro-batch, and to restore one takes long.
_last_used: deque[Engine] = deque(maxlen=_MODELS_KEPT)
_restored: WeakValueDictionary[tuple[str, str, Computing], Engine] = WeakValueDictionary()


@contextmanager
def ready(plan: dict[str, Any], weights: Callable[[], Buffer], *, cpus: int, gpus: list[str]) -> Iterator[Engine]:
    """Yield the plan's model on its device, ready to be called, while its framework uses so many threads.

    weights : is called for them unless this process has the model already.
    gpus    : the addresses of the task's GPUs.
    """
    framework = imported(plan)
    with nullcontext() if framework is None else framework.threads(cpus):
        kept = _engine(plan, weights, gpus)
        kept.use_threads(cpus)
        engine = kept
        if plan["transform"] is not None:
            engine = copy.copy(kept)  # The kept one serves every model of these weights and this code.
            engine.transform = unpickled(plan["transform"], "transforms the inputs")
        yield engine  # Meanwhile `kept` is referred to here, so that it is not restored a second time.


def are_there() -> bool:
    """Tell whether this process keeps any model."""
    return bool(_last_used)


def imported(plan: dict[str, Any]) -> Framework | None:
    """Import the framework of the plan's model, and return it; None where there is nothing to import."""
    framework = frameworks.find(registry.find(plan["engine"]).framework)
    framework = None if framework is None else framework.predicting(plan["facts"])
    _import(framework)
    return framework


def unpickled(code: bytes, does: str) -> Any:
    """Return functions that a model applies to its inputs. Raises TritiumError where this executor lacks a package."""
    try:
        return pickle.loads(code)
    except (ImportError, AttributeError) as error:
        raise TritiumError(
            f"The function that {does} can't run on this executor: {error}. Install the missing package "
            "there; your own modules go along by value, what is in site-packages does not."
        ) from error


@functools.cache
def _import(framework: Framework | None) -> None:
    """Import the framework, once in this process, and exempt its objects from garbage collection.

    A worker of Spark's daemon collects garbage after every task: with torch's 180,000 objects that takes 0.25 s of a
    core (torch 2.13), longer than the micro-batch of a stream, and the next task waits for it.
    """
    if framework is None:
        return
    before_import("tensorflow", import_triton)
    try:
        with without_collections():
            framework.load()
    except ImportError as error:
        raise WrongVersion(
            f"{sys.executable} on {socket.gethostname()} can't import {framework.name}: {error}. Executors that score "
            "with a model need it: install it there, or set PYSPARK_PYTHON (spark.pyspark.python with spark-submit) to "
            "a Python that has it before the session is made."
        ) from error
    gc.collect()
    gc.freeze()


def _engine(plan: dict[str, Any], weights: Callable[[], Buffer], gpus: list[str]) -> Engine:
    """Return the plan's model on its device: the one that this process has already, if any."""
    kind = registry.find(plan["engine"])
    device = kind.task_device(plan["device"], gpus)
    key = (plan["content"], device, plan["computes"])
    engine = _restored.get(key)
    if engine is None:
        try:
            engine = kind.restore(weights(), plan["facts"], plan["code"], device=device)
        except (ImportError, AttributeError) as error:
            raise TritiumError(
                f"The model's code can't run on this executor: {error}. Install the missing package there; your own "
                "modules go along by value, what is in site-packages does not."
            ) from error
        engine.computes = plan["computes"]
        _restored[key] = engine
    if engine in _last_used:
        _last_used.remove(engine)
    _last_used.append(engine)
    return engine

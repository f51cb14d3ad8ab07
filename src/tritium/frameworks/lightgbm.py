"""LightGBM: `lightgbm.train` and the scikit-learn classes train one model on the rows of all ranks (rank)."""

from __future__ import annotations

import ctypes
import functools
import importlib
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from tritium.errors import BadSetting
from tritium.frameworks.framework import Framework, Place
from tritium.frameworks.lightgbm_network import connect

_OWN_NETWORK = ("machines", "machine_list_filename", "num_machines")
_TREES = "tree_learner"
_VERBOSITY_WARNINGS, _VERBOSITY_DEFAULT = 0, 1


@dataclass(frozen=True, kw_only=True)
class LightGBM(Framework):
    """LightGBM: every training is LightGBM's own distributed training, each rank with its rows.

    `tree_learner` is "data" unless the parameters give another one; "serial" trains alone. Metrics are averaged over
    the ranks, so that early stopping ends all of them at one iteration.
    """

    name = "lightgbm"
    modules = ("lightgbm",)
    install = "lightgbm"
    secondary = re.compile(r"LightGBMError: .*(socket|connect|[Ss]end|[Rr]ecv|network)", re.DOTALL)

    def run(self, place: Place, function: Callable[[], Any]) -> Any:
        """Call the function, in which every training booster connects the ranks."""
        if place.size == 1:
            return function()
        library: Any = sys.modules["lightgbm"]
        _hook(library, place)
        # The network stays until the process ends, as a rank whose connection is merely closed would wait in an endless
        # loop. A rank that waits when this function has returned gets an error otherwise: see `Framework.on_returned`.
        return function()

    @contextmanager
    def threads(self, cpus: int | None) -> Iterator[None]:
        """Let LightGBM use at most `cpus` threads."""
        basic = importlib.import_module("lightgbm.basic")
        before = ctypes.c_int(-1)
        if cpus is not None:
            basic._safe_call(basic._LIB.LGBM_GetMaxThreads(ctypes.byref(before)))
            basic._safe_call(basic._LIB.LGBM_SetMaxThreads(ctypes.c_int(cpus)))
        try:
            yield
        finally:
            if cpus is not None:
                basic._safe_call(basic._LIB.LGBM_SetMaxThreads(before))


@contextmanager
def joined(place: Place, verbosity: int) -> Iterator[dict[str, Any]]:
    """Connect the ranks for a block that trains one model, and yield the parameters that its booster needs for it.

    verbosity : LightGBM's parameter, for its messages about the connection.

    A Dataset that is constructed before has the bins that its maker gave it. One that is constructed in the block has
    those that LightGBM finds in a part of the rows.
    """
    if place.size == 1:
        yield {}
        return
    library: Any = sys.modules["lightgbm"]
    basic = importlib.import_module("lightgbm.basic")
    connect(place, functools.partial(_init, basic, verbosity), functools.partial(_free, library))
    try:
        yield {"num_machines": place.size, "pre_partition": True}
    finally:
        _free(library)


def _hook(library: Any, place: Place) -> None:
    basic = importlib.import_module("lightgbm.basic")
    booster = library.Booster
    make = booster.__init__
    aliases = basic._ConfigAliases

    @functools.wraps(make)
    def init(self: Any, params: Any = None, train_set: Any = None, *args: Any, **options: Any) -> None:
        self._ranks = None
        # Left alone: the booster of a loaded model, and the user's own network.
        if train_set is None or aliases.get(*_OWN_NETWORK) & set(params or {}):
            make(self, params, train_set, *args, **options)
            return
        _free(library)
        params = basic._choose_param_value(_TREES, dict(params or {}), None)
        if params[_TREES] == "serial":
            make(self, params, train_set, *args, **options)
            return
        params[_TREES] = params[_TREES] or "data"
        if train_set._handle is not None:
            raise BadSetting(
                f"The Dataset of rank {place.rank} was constructed before the training, so its bins are those of this "
                "rank's rows alone. Give train() a Dataset on which neither construct() nor num_data() was called.",
                setting="train_set",
            )
        _agree(place, {name: _chosen(basic, params, name) for name in ("objective", "num_class", _TREES)})
        asked = basic._choose_param_value("verbosity", dict(params), None)["verbosity"]
        verbosity = None if asked is None else int(asked)
        connect(place, functools.partial(_init, basic, verbosity), functools.partial(_free, library))
        for alias in aliases.get("pre_partition"):
            params.pop(alias, None)
        params.update(num_machines=place.size, pre_partition=True)
        train_set._update_params(params)
        self._ranks = place
        make(self, params, train_set, *args, **options)

    booster.__init__ = init
    for name in ("eval", "eval_train", "eval_valid"):
        setattr(booster, name, _averaged(getattr(booster, name)))


def _init(basic: Any, verbosity: int | None, machines: list[str], port: int) -> None:
    _write(basic, _VERBOSITY_WARNINGS if verbosity is None else verbosity)
    minutes_between_messages = 24 * 60  # Long, as Tritium ends ranks whose peer is gone.
    basic._safe_call(
        basic._LIB.LGBM_NetworkInit(",".join(machines).encode(), port, minutes_between_messages, len(machines))
    )
    if verbosity is None:
        _write(basic, _VERBOSITY_DEFAULT)


def _write(basic: Any, verbosity: int) -> None:
    """Set the verbosity of LightGBM in this thread.

    This calls the shortest of its functions that read parameters; a version that has none of them keeps its verbosity.
    """
    text = f"verbosity={verbosity}".encode()
    basic._safe_call(basic._LIB.LGBM_GetSampleCount(ctypes.c_int32(1), text, ctypes.byref(ctypes.c_int())))


def _free(library: Any) -> None:
    library.basic._LIB.LGBM_NetworkFree()


def _averaged(evaluate: Callable[..., Any]) -> Callable[..., Any]:
    """Let a booster's metrics be the mean over the ranks, so that all ranks stop at the same iteration."""

    @functools.wraps(evaluate)
    def mean(self: Any, *args: Any, **options: Any) -> Any:
        results = evaluate(self, *args, **options)
        place = getattr(self, "_ranks", None)
        if place is None or not results:
            return results
        every = place.gather([result[2] for result in results])
        means = np.mean(np.asarray(every, float), axis=0)
        return [_with_value(result, float(value)) for result, value in zip(results, means, strict=True)]

    return mean


def _with_value(result: Any, value: float) -> Any:
    """Return a metric's result with another value: (dataset, metric, value, …), since LightGBM 4.7 a named tuple."""
    fields = (*result[:2], value, *result[3:])
    return type(result)(*fields) if hasattr(result, "_fields") else fields


def _chosen(basic: Any, params: Mapping[str, Any], name: str) -> str:
    return str(basic._choose_param_value(name, dict(params), None)[name])


def _agree(place: Place, mine: Mapping[str, str]) -> None:
    """Raise BadSetting, the same on every rank, where ranks would train different models."""
    every = place.gather(dict(mine))
    for rank, theirs in enumerate(every):
        for name, value in every[0].items():
            if theirs[name] != value:
                raise BadSetting(
                    f"Ranks train with different parameters: {name} is {value} on rank 0 and {theirs[name]} on rank "
                    f"{rank}. Give the same ones; where LGBMClassifier has found them in the labels of a rank's rows, "
                    "use lightgbm.train with objective and num_class.",
                    setting=name,
                )

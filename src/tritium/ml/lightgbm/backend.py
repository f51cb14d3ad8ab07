"""`LightGBMBackend`: LightGBM as the backend of estimators (driver, rank)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import lightgbm
import numpy as np
from lightgbm.callback import CallbackEnv

from tritium import file_system
from tritium.data.schema import Field
from tritium.errors import BadSetting
from tritium.ml.backend import Backend, DryRun
from tritium.ml.dry_run import text_of
from tritium.ml.lightgbm import training
from tritium.ml.lightgbm.checkpoint import identity
from tritium.ml.lightgbm.features import Features
from tritium.ml.lightgbm.names import METRIC_NAMES
from tritium.ml.lightgbm.parameters import lightgbm_params, refuse_params
from tritium.ml.lightgbm.settings import LightGBMClassifierSettings, LightGBMRankerSettings, LightGBMSettings
from tritium.model.model import Model
from tritium.model.signature import Output, Signature

_ROWS = 60


class LightGBMDryRun(DryRun[LightGBMSettings]):
    """A training of one tree on a few made-up rows, in which LightGBM refuses wrong settings."""

    def __init__(self, fields: Sequence[Field], shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Try the features of these batch columns.

        shapes : batch column → shape of a row, where it is known.
        """
        self._slots = {field.name: field.slots for field in fields}
        widths = {name: math.prod(shape) for name, shape in shapes.items()}
        known = all(field.name in widths for field in fields)
        self._features = Features.of(fields, widths) if known else None
        self._vector = None if known else fields[0].sources[0]

    @property
    def scores(self) -> None:
        """None: the number of classes is known when the labels are."""

    @property
    def outputs(self) -> tuple[Output, ...] | None:
        """None, as `scores`."""
        return None

    def train(
        self, settings: LightGBMSettings, labels: Mapping[str, Field], shapes: Mapping[str, tuple[int, ...] | None]
    ) -> dict[str, tuple[str, ...]]:
        """Train one tree, and return the slots of each batch column. Raises BadSetting with LightGBM's message."""
        if self._features is None:  # Only the ranks know how long the arrays are, and check positions in them.
            _refuse_names(settings, Features((), (), (), self._vector))
            return self._slots
        classes = None
        if isinstance(settings, LightGBMClassifierSettings):
            several = any(name.startswith(("multi_", "auc_mu")) for name in settings.given_metrics())
            several = several or settings.objective not in (None, "binary")
            classes = settings.num_class or (3 if several else 2)
        random = np.random.default_rng(0)
        x = random.integers(0, 5, (_ROWS, len(self._features.names))).astype(settings.feature_dtype)
        y = np.arange(_ROWS) % (classes or 2) if classes or settings.together else random.uniform(0.1, 0.9, _ROWS)
        group = [_ROWS] if isinstance(settings, LightGBMRankerSettings) else None
        params = lightgbm_params(settings, self._features, classes, 1) | {"num_threads": 1, "verbosity": -1}
        try:
            booster = lightgbm.Booster(params, lightgbm.Dataset(x, y, group=group, params=params))
            booster.update()
            known = [
                METRIC_NAMES.get(str(result[1]), str(result[1])).partition("@")[0] for result in booster.eval_train()
            ]
        except (lightgbm.basic.LightGBMError, TypeError, ValueError) as error:
            raise BadSetting(f"LightGBM does not take these settings: {error}") from error
        _try_callbacks(settings, booster)
        if unknown := [name for name in settings.given_metrics() if name.partition("@")[0] not in known]:
            raise BadSetting(
                f"metrics names {unknown[0]!r}, which LightGBM does not compute for objective={params['objective']!r}.",
                setting="metrics",
            )
        return self._slots


class LightGBMBackend(Backend[LightGBMSettings]):
    """The backend that trains a `lightgbm.Booster` on the rows of all ranks."""

    train = staticmethod(training.train)

    def dry_run(
        self, settings: LightGBMSettings, fields: Mapping[str, Field], shapes: Mapping[str, tuple[int, ...]]
    ) -> LightGBMDryRun:
        """Check the parameters, and return a dry run for as many features as the columns have."""
        refuse_params(settings)
        return LightGBMDryRun([fields[name] for name in settings.inputs()], shapes)

    def identity(self, settings: LightGBMSettings, fields: Sequence[Field]) -> dict[str, Any]:
        """Return the identity: settings and columns, as no code of the user's is trained."""
        return identity(settings, fields)

    def restore(
        self, settings: LightGBMSettings, run_dir: str, signature: Signature, history: list[dict[str, Any]]
    ) -> Model:
        """Return the booster that rank 0 has stored, as a Model."""
        booster = lightgbm.Booster(model_str=file_system.read(f"{run_dir}/{training.WEIGHTS}").decode())
        return Model(booster, signature, history=history, engine="lightgbm")


def _try_callbacks(settings: LightGBMSettings, booster: lightgbm.Booster) -> None:
    """Call LightGBM's own callbacks that change parameters, as reset_parameter does. Raises BadSetting if one fails."""
    last = settings.num_iterations - 1
    for callback in settings.callbacks:
        if type(callback).__module__ != CallbackEnv.__module__ or not getattr(callback, "before_iteration", False):
            continue
        for iteration in (0, last):
            try:
                callback(CallbackEnv(booster, {}, iteration, 0, settings.num_iterations, None))
            except Exception as error:
                raise BadSetting(
                    f"the callback {type(callback).__name__} fails before iteration {iteration}: {text_of(error)}",
                    setting="callbacks",
                ) from error


def _refuse_names(settings: LightGBMSettings, features: Features) -> None:
    """Raise BadSetting for a name where features are told by their positions alone."""
    for setting in ("categorical_features", "monotone_constraints"):
        for key in getattr(settings, setting) or ():
            if isinstance(key, str):
                features.position(setting, key)

"""MLflow's registry of models: which version an alias names, and a model's files (any process)."""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tritium.errors import BadSetting, ModelError, WrongVersion

_SCHEME = "models:/"
_ALIAS = re.compile(r"models:/([^/@]+)@([^/@]+)")
FOLDER = "model"
"""The directory of a model of Tritium within the data of its MLflow model."""


def is_registered(path: str) -> bool:
    """Tell whether a path names a model in MLflow's registry."""
    return path.startswith(_SCHEME)


def library() -> Any:
    """Return MLflow. Raises WrongVersion where it is not installed."""
    try:
        import mlflow.pyfunc
    except ImportError as error:
        raise WrongVersion(
            f"This needs MLflow, which {sys.executable} does not have: pip install 'tritium[mlflow]'.",
            library="mlflow",
        ) from error
    return mlflow


def version_of(uri: str) -> int:
    """Return the version that an alias has now. Raises BadSetting for a URI without alias, and MlflowException."""
    match = _ALIAS.fullmatch(uri)
    if match is None:
        raise BadSetting(
            f"{uri!r} has no alias, and a version by its number never changes. Give the registered model one, "
            'client.set_registered_model_alias("bikes", "champion", 3), and follow "models:/bikes@champion".'
        )
    return int(library().MlflowClient().get_model_version_by_alias(*match.groups()).version)


@contextmanager
def downloaded(uri: str) -> Iterator[str]:
    """Yield the directory of the Tritium model at an MLflow URI or path; what is mapped from it stays readable.

    Raises MlflowException where it can't be had, and ModelError where it is no model of Tritium.
    """
    with tempfile.TemporaryDirectory(prefix="tritium-") as folder:
        place = os.path.join(library().artifacts.download_artifacts(uri, dst_path=folder), "data", FOLDER)
        if not os.path.isdir(place):
            raise ModelError(f"The MLflow model {uri!r} is none of Tritium's: it has no data/{FOLDER}.", path=uri)
        yield place


def uri_of(alias: str, version: int) -> str:
    """Return the URI of a version of the model whose alias this is."""
    return f"{alias.partition('@')[0]}/{version}"

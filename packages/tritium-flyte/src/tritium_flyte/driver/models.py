"""`SavedModel`: a model that a task has saved, as Flyte's directory (the driver of a task)."""

from __future__ import annotations

import json
from typing import Any

from flyte.io import Dir

import tritium as tr
from tritium.errors import ModelError
from tritium_flyte.driver.context import new_place
from tritium_flyte.tables import sha256

_UNCOUNTED = "history.json"
"""The file of a saved model that has times, and no part in what it predicts."""


class SavedModel(Dir):
    """A saved model as parameter or result of a task, by reference.

    Its hash is that of weights, signature and code: a training that ends with the same model, at another time, does not
    have later tasks run again.
    """

    @classmethod
    def of(cls, model: Any) -> SavedModel:
        """Save a model into the task's own place, and return it.

        model : a `tr.Model`, or the model that an estimator has fitted.
        """
        path = new_place("model")
        getattr(model, "model", model).save(path)
        return cls(path=path, name="model", format="tritium", hash=sha256(json.dumps(_checksums(path))))

    def load(self, trusted: bool = False) -> Any:
        """Return the `tr.Model`, as `tr.load(self.path, trusted)` does.

        trusted : whether code of the model may run, where it has some that this process has not saved.

        Raises ModelError where the place was deleted: a cached SavedModel outlives its files.
        """
        try:
            return tr.load(self.path, trusted)
        except ModelError as error:
            if not self.exists_sync():
                raise ModelError(
                    f"The model {self.path} can't be read any more: there is nothing at its place. A cached result "
                    'outlives the files that it names. Have its task run again: cache(salt="2"), or, '
                    "on a backend, the run's overwrite_cache=True.",
                    path=self.path,
                ) from error
            raise


def _checksums(path: str) -> dict[str, str]:
    """Return the checksums in the manifest of a saved model by file, in order."""
    import fsspec  # type: ignore[import-untyped]

    with fsspec.open(f"{path}/manifest.json", "rb") as file:
        files = json.load(file)["files"]
    return {name: files[name]["sha256"] for name in sorted(files) if name != _UNCOUNTED}

"""`Training`: the function that a backend runs on every rank, and the rows that it reads there (driver, rank)."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from tritium import Data, launch, world
from tritium.errors import BadSetting
from tritium_compat.horovod.spark.common.reach import check_reached

_FOREVER = 1 << 40  # epochs; how many are taken follows from the steps
Rows = dict[str, np.ndarray[Any, Any]]


class Training:
    """A function of a rank: `train(rank, *args)` with the rows, wherever a backend calls it.

    train : the function of the framework, which gets a Rank.
    kind : what connects the ranks: "horovod", "keras" or "lightning".
    settings : the estimator's parameters that a rank needs, by name.
    frames : "train", and "validation" where there is one, by name: the DataFrames stay on the driver.
    parquet : where the rows are instead, for a backend that is not Spark's: paths in the store by the same names.
    """

    def __init__(
        self,
        train: Callable[..., Any],
        kind: str,
        settings: Mapping[str, Any],
        columns: Sequence[str],
        frames: Mapping[str, Data],
        store: Any,
        run_id: str,
        mark: str | None,
        parquet: Mapping[str, str] | None = None,
    ) -> None:
        self.train, self.kind, self.settings, self.columns = train, kind, dict(settings), list(columns)
        self.frames, self.store, self.run_id, self.mark, self.parquet = dict(frames), store, run_id, mark, parquet

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "frames": {}}

    def namespace(self) -> SimpleNamespace:
        """Return the settings as attributes."""
        return SimpleNamespace(**self.settings)

    def data(self) -> dict[str, Data]:
        """Return the rows for `tr.launch`, a batch column for each column."""
        return {name: self._reading(frame) for name, frame in self.frames.items()}

    def _reading(self, rows: Any) -> Data:
        columns = {name: name for name in self.columns}
        data = rows if isinstance(rows, Data) else Data(rows)
        return dataclasses.replace(data, columns=columns, default_dtype="float32", nan="keep")

    def framework(self) -> Any:
        """Return the framework for `tr.launch`."""
        if self.kind != "keras":
            return self.kind
        import keras

        from tritium import Keras

        return Keras(backend=keras.backend.backend())

    def __call__(self, *args: Any) -> Any:
        """Train on this rank, and return what the framework's function returns."""
        if self.parquet is None:
            return self.train(Rank(self), *args)
        return self._over_parquet(*args)

    def _over_parquet(self, *args: Any) -> Any:
        """Read this rank's part of the store's Parquet files, and train on it in this very process."""
        size = int(os.environ.get("WORLD_SIZE", "1"))
        if size > 1:
            raise BadSetting(
                "A Backend of your own trains on one process, and this one has started "
                f"{size} (WORLD_SIZE). Derive it from SparkBackend, whose run gives each rank its rows.",
                setting="backend",
            )
        assert self.parquet is not None
        tables = {name: self.store.get_parquet_dataset(path).read() for name, path in self.parquet.items()}
        data = {name: self._reading(table.select(self.columns)) for name, table in tables.items()}
        alone = Training(self.train, self.kind, self.settings, self.columns, {}, self.store, self.run_id, self.mark)
        return launch(alone, on="here", args=args, data=data, framework=self.framework(), progress=False)[0]


class Rank:
    """What the training function of a framework knows of its rank: the settings, the rows, the store."""

    def __init__(self, training: Training) -> None:
        self.world = world()
        self.settings = training.namespace()
        self.columns = training.columns
        check_reached(training.store, training.mark, self.world.host)
        self.store = training.store.to_remote(training.run_id)

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which keeps checkpoints and logs."""
        return self.world.rank == 0

    @property
    def verbose(self) -> int:
        """How much this rank prints: rank 0 what was asked for, others nothing."""
        return int(self.settings.verbose) if self.is_first else 0

    def note(self, text: str) -> None:
        """Show a line of rank 0, unless verbose=0."""
        if self.verbose:
            self.world.note(text)

    @property
    def batch_size(self) -> int:
        """Rows of a batch to train on."""
        return int(self.settings.batch_size)

    @property
    def val_batch_size(self) -> int:
        """Rows of a batch to validate on."""
        return int(self.settings.val_batch_size or self.settings.batch_size)

    @property
    def validates(self) -> bool:
        """Whether there are rows to validate on."""
        return bool(self.settings.validation)

    def rows(self, name: str) -> int:
        """Return the rows of all ranks in "train" or "validation"."""
        return sum(self.world.shard(name).counts)

    def steps(self, rounding: Callable[[float], int], name: str = "train") -> int:
        """Return the steps of an epoch: what was asked for, or rows / batch size / ranks, rounded."""
        training = name == "train"
        asked = self.settings.train_steps_per_epoch if training else self.settings.validation_steps_per_epoch
        if asked is not None:
            return int(asked)
        size = self.batch_size if training else self.val_batch_size
        return max(1, int(rounding(self.rows(name) / size / self.world.size)))

    def train_rows(self) -> Iterator[Rows]:
        """Return batches to train on without end: one pass over the rows after the other, each in another order."""
        return self._batches("train", self.batch_size, bool(self.settings.shuffle))

    def validation_rows(self) -> Iterator[Rows]:
        """Return batches to validate on without end, in the same order in every pass."""
        return self._batches("validation", self.val_batch_size, False)

    def _batches(self, name: str, batch_size: int, shuffle: bool) -> Iterator[Rows]:
        order: dict[str, Any] = {"shuffle": "full" if shuffle else False, "seed": self.settings.random_seed or 0}
        epochs = self.world.shard(name).epochs(
            _FOREVER, batch_size=batch_size, remainder="repeat", device=None, **order
        )
        for epoch in epochs:
            for batch in epoch:
                yield transformed({column: batch[column] for column in self.columns}, self.settings)


def transformed(rows: Rows, settings: SimpleNamespace) -> Rows:
    """Return the rows as `transformation_fn` changes them, which gets a pandas DataFrame and returns one."""
    if settings.transformation_fn is not None:
        import pandas as pd  # type: ignore[import-untyped]

        frame = pd.DataFrame({name: list(values) if values.ndim > 1 else values for name, values in rows.items()})
        changed = settings.transformation_fn(frame)
        if not isinstance(changed, pd.DataFrame):
            raise BadSetting(
                f"transformation_fn returned a {type(changed).__name__}, and must return the changed DataFrame.",
                setting="transformation_fn",
            )
        rows = {str(name): _array(changed[name]) for name in changed.columns}
    for name, dtype, shape, _ in settings.transformation_edit_fields or ():
        if name not in rows:
            there = ", ".join(rows)
            raise BadSetting(f"transformation_edit_fields names {name!r}, and the rows have {there}.", setting=name)
        rows[name] = rows[name].astype(dtype).reshape(-1, *(shape or ()))
    removed = settings.transformation_removed_fields or ()
    return {name: values for name, values in rows.items() if name not in removed}


def _array(column: Any) -> np.ndarray[Any, Any]:
    values = column.to_numpy()
    return np.stack([np.asarray(value) for value in values]) if values.dtype == object else values

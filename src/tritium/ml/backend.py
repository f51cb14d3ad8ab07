"""`Backend`: the interface between `fitting` and a framework such as torch (driver, rank)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

from tritium.checkpoint.code import Opener, plain
from tritium.data.schema import Field
from tritium.ml.settings import Settings
from tritium.model.model import Model
from tritium.model.signature import Output, Signature

S = TypeVar("S", bound=Settings)


class DryRun(ABC, Generic[S]):
    """A model that was called with rows of zeros on the driver, before anything starts."""

    @property
    @abstractmethod
    def scores(self) -> tuple[int, ...] | None:
        """The shape of a row of the output; None where that is not known yet, or the output is not one array."""

    @property
    @abstractmethod
    def outputs(self) -> tuple[Output, ...] | None:
        """What the model returns in eval mode, as it is called for predictions; None where that is not known yet."""

    @property
    def notes(self) -> tuple[str, ...]:
        """Lines for the user about what was found."""
        return ()

    @abstractmethod
    def train(self, settings: S, labels: Mapping[str, Field], shapes: Mapping[str, tuple[int, ...] | None]) -> Any:
        """Try one step of training, and return the picklable `facts` that `Backend.train` is given.

        settings : with the task that follows from the scores.
        labels : the batch columns of the labels by name; `shapes` are those of a row, None where only the data will
                 tell.

        Raises BadSetting and BadData for what can't be trained.
        """


class Backend(ABC, Generic[S]):
    """What an estimator needs of a framework. It keeps no state."""

    opened: Opener = staticmethod(plain)
    """Takes apart objects of the framework among the settings, to compare them between sessions."""

    train: Callable[..., dict[str, Any] | None]
    """The function that every rank runs: (settings, validate, facts, user_run_dir, identity).

    settings : S
    validate : whether there is a shard "validation" beside "train".
    facts : what `DryRun.train` returned.
    user_run_dir : whether the user named the run directory; a training that was begun there then continues.
    identity : what `identity` returned, to be kept in the checkpoints; None where none are written.
    Rank 0 stores the weights and returns `history`, and `inputs` and `outputs` as name → (dtype, shape of a row).
    """

    def loaded(self, settings: S) -> S:
        """Return the settings with what they name by a path, read on the driver. Raises BadSetting."""
        return settings

    @abstractmethod
    def dry_run(self, settings: S, fields: Mapping[str, Field], shapes: Mapping[str, tuple[int, ...]]) -> DryRun[S]:
        """Call the model with zeros.

        fields : every batch column by name.
        shapes : the shape of a row of those batch columns for which it is known without data.

        Raises BadData and BadSetting when the model does not take them, or can't be made.
        """

    @abstractmethod
    def identity(self, settings: S, fields: Sequence[Field]) -> dict[str, Any]:
        """Return what must be equal for a training to continue from existing checkpoints, with hashes of its code.

        Name → value, and beside those `code` (name → text, exact, loose, known), `architecture` (a text of the model)
        and `versions` (library → version). `ml.peek` compares it.
        """

    @abstractmethod
    def restore(self, settings: S, run_dir: str, signature: Signature, history: list[dict[str, Any]]) -> Model:
        """Return the model that rank 0 has stored in the run directory."""

"""`FunctionSettings`: the user's own training and prediction as the settings of an estimator (any process)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from tritium.arguments import argument_names, name_of, takes
from tritium.hints import question
from tritium.ml.fields import setting
from tritium.ml.settings import Settings


@dataclass
class Trained:
    """A result that `train` may return in place of the state alone: the state, and the history of its training."""

    state: Any
    history: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class FunctionSettings(Settings):
    """Your own training and prediction: every field is also a Spark ML Param of `FunctionEstimator`."""

    needs_label: ClassVar[bool] = False
    choices: ClassVar[Mapping[str, tuple[Any, ...]]] = {**Settings.choices, "scores": (True, False)}
    hints: ClassVar[Mapping[str, str]] = {
        **Settings.hints,
        **dict.fromkeys(("epochs", "batch_size", "learning_rate", "lr"), question("config")),
    }

    train: Any = setting(
        "A function (world, settings) -> state, which every rank runs. world.shard('train') has the rows, and "
        "world.shard('validation') those to validate on; world.checkpoint keeps what a retry continues from. The state "
        "of rank 0 is the model: anything that can be pickled, or Trained(state, history).",
        resume="any",
    )
    predict: Any = setting(
        "A function (state, batch) -> predictions: an array with a row for each of the batch, or a tuple or a dict of "
        "such arrays. The batch is a mapping of NumPy arrays by the names of feature_cols ('features' where it is no "
        "mapping). It must need no other rows, and no gang.",
        resume="any",
    )
    scores: bool = setting(
        "Whether predict returns scores for a classification, of which softmax (of one score a row: sigmoid) makes "
        "probabilities. False: it returns probabilities.",
        False,
        resume="any",
    )
    config: Mapping[str, Any] | None = setting(
        "Values for the two functions, which find them in settings.config: {'rate': 0.1, 'epochs': 5}. They are one "
        "Param, so that a grid of them can be searched.",
        None,
        resume="any",
    )
    label_cols: Any = setting(
        "Floating columns: float32 [batch, n]. One integer column: int64 [batch]. A mapping from names to either of "
        "these: several labels. None: there is no label.",
        None,
        resume="any",
    )

    def problems(self) -> Iterator[str]:
        """Yield a sentence for each error of the settings."""
        yield from super().problems()
        for name, called in (("train", "world, settings"), ("predict", "state, batch")):
            function = getattr(self, name)
            if not callable(function):
                yield f"{name}={function!r} is not a function."
            elif not takes(function, 2):
                arguments = ", ".join(argument_names(function)) or "nothing"
                yield f"{name}={name_of(function)} takes {arguments}; it is called with ({called})."
        if self.config is not None and not isinstance(self.config, Mapping):
            yield f"config={self.config!r} must be a mapping from names to values."

    @property
    def tries(self) -> bool:
        """Whether to try something before the training: only the decoding of values, as there is no model yet."""
        return bool(self.decode)

    def gives_probabilities(self) -> bool:
        """Return whether `predict` returns probabilities."""
        return not self.scores

    def has_own_step(self) -> bool:
        """Return True: nothing is known of the loss."""
        return True

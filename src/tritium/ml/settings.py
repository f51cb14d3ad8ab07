"""The settings of estimators of all frameworks, each written once (any process)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal, TypeVar

from tritium.arguments import argument_names, name_of, takes
from tritium.data.schema import NO_DECODE, is_dataset, shown_decode
from tritium.errors import BadSetting
from tritium.gang.settings import ELSEWHERE, Gang, as_int
from tritium.hints import did_you_mean, question, suggest
from tritium.ml.fields import is_names, is_number, is_whole, setting

S = TypeVar("S", bound="Settings")
FEATURES, LABEL, WEIGHT = "features", "label", "weight"
PREDICTION_COLUMNS: tuple[str, ...] = (
    *("prediction_col", "probability_col", "raw_prediction_col", "prediction_label_col", "label_index_col"),
)
"""The settings that name columns which the trained model adds: one, three for a classification, all for one of words.

It has Params of the same names."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings that estimators of all frameworks share; the dataclass of a framework adds its own.

    Every field is also a Spark ML Param of the estimator.
    """

    framework: ClassVar[str] = ""
    """The `framework` of the gang; "" where the user chooses it."""
    needs_label: ClassVar[bool] = True
    """Whether `label_cols` must be given."""
    choices: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "task": ("auto", "regression", "classification", None),
        "nan": ("error", "keep"),
        "unknown_words": ("error", "keep"),
        "on_error": ("fail", "skip", "null", "column"),
        "verbose": (True, False),
    }
    """Setting → the values it may have."""
    hints: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("val_split", "validation_split", "validation_data", "val_data"), question("validation")),
        **{name: question(ours) for name, ours in ELSEWHERE.items()},
        "handle_invalid": question("on_error"),
    }
    """The name of a setting in other libraries → advice."""
    whole: ClassVar[tuple[str, ...]] = ("seed", "prediction_batch_size", "decode_threads")
    """The settings that are whole numbers, also where NumPy's or a float such as 3.0 are given."""
    one_input: ClassVar[bool] = False
    """Whether the model takes one array of numbers, in which words are categories, and its label is one number."""
    words_in_model: ClassVar[str] = ""
    """What becomes of the framework's own layers of words, for the advice in an error about a column of strings."""
    loss_of_numbers: ClassVar[str] = "the mean squared error"
    """How the framework writes a loss for a number to predict, for the advice in an error."""

    feature_cols: Any = setting(
        "What the model is called with. A list of scalar columns: one float32 tensor [batch, n]. The name of "
        "one vector, array or scalar column: that column, floats as float32, integers as int64. A mapping from "
        "names to either of these: several tensors, passed by keyword.",
        resume="any",
    )
    label_cols: Any = setting(
        "Floating columns: a float32 label [batch, n]. One integer column: class indices, int64 [batch]; for "
        "classification with a score per class also one floating column of whole numbers, as "
        "StringIndexer makes it. A mapping from names to either of these: several labels, each of its own dtype.",
        resume="any",
    )
    nulls: Mapping[str, Any] | None = setting(
        "Column -> what takes the place of a null in it, in training and prediction: a number, or a word for a column "
        'of strings: {"age": 0, "city": "?"}. A null in any other column is an error.',
        None,
        resume="same",
    )
    vocabulary: Any = setting(
        'Column of strings -> its words, whose index the model gets (int64): {"city": ["Rome", "Oslo"]}. In place of '
        'the words: "learn" takes those of the rows to train on, the most frequent first; a number takes the most '
        "frequent ones, so many. A list of columns learns the words of each.",
        None,
        resume="any",
    )
    unknown_words: Literal["error", "keep"] = setting(
        "Whether a word that is not in its vocabulary is an error, or has the index after the last word's "
        '("keep"), in training and prediction.',
        "error",
        resume="same",
    )
    hash_buckets: Mapping[str, int] | None = setting(
        'Column of strings -> n: the model gets crc32(word) mod n (int64), which needs no vocabulary: {"city": 1000}.',
        None,
        resume="same",
    )
    decode: Mapping[str, Any] | None = setting(
        "Column of bytes, strings or integers -> a function from its value to an array, in training and prediction: "
        "for images. For integers also a map-style dataset, of which each is the index. All rows must give arrays of "
        "one shape and dtype.",
        None,
        resume="code",
    )
    nan: Literal["error", "keep"] = setting(
        'Whether a NaN in a floating column is an error, or handed to the model as it is ("keep"), in training and '
        "prediction.",
        "error",
        resume="same",
    )
    normalize: Any = setting(
        "Whether the model gets features less their mean, divided by their standard deviation, in training, validation "
        "and prediction. True takes all that are floating numbers, a list of columns those; both are learnt over the "
        "rows to train on. A mapping gives them: {'age': (38.5, 12.1)}.",
        None,
        resume="same",
    )
    pad: Mapping[str, Any] | None = setting(
        'Array column -> the length that its rows are filled up to, with zeros: {"tokens": 128}, or with another '
        'number: {"tokens": (128, -1)}. Without, all rows must have one length.',
        None,
        resume="same",
    )
    decode_threads: int = setting(
        "The threads of a rank in which the rows of a batch are decoded at once.", 1, resume="any"
    )
    weight_col: str | None = setting(
        "A column of weights. They multiply the per-row losses, and the mean stays over rows (as in Keras).",
        None,
        resume="same",
    )
    task: Literal["auto", "regression", "classification"] | None = setting(
        'What predictions are: "regression" (a double for one output, else an array), "classification" (a class '
        'index, with "probability" beside it), or None (arrays). "auto": what loss and label columns suggest.',
        "auto",
        resume="same",
    )
    validation: Any = setting(
        "Rows to validate on after each epoch: a fraction (each row is drawn on its own, by the seed), the name of a "
        "boolean column (True: validate), or a DataFrame.",
        None,
        resume="any",
    )
    validation_group: str | None = setting(
        "A column of integers, strings or dates, of a patient or a user, say: for a validation fraction, rows with "
        "equal values are drawn together, so that all are trained on or all validated on.",
        None,
        resume="same",
    )
    seed: int = setting("Decides initial weights, the order of rows and the validation fraction.", 0, resume="same")
    row_key: Any = setting(
        "Columns that identify a row. Rows are sorted by them within their partitions, so that an epoch which is "
        "resumed after a loss continues exactly, also when Spark computes a join or an aggregation again. A validation "
        "fraction is drawn by them, so that it is the same then, too.",
        None,
        resume="any",
    )
    prediction_col: str = setting("The column of predictions that the model adds.", "prediction", resume="any")
    probability_col: str = setting(
        "The column of probabilities that a classification adds.", "probability", resume="any"
    )
    raw_prediction_col: str = setting(
        "The column of the logarithms of the probabilities that a classification adds, as Spark's evaluators take "
        'them; "": none.',
        "rawPrediction",
        resume="any",
    )
    prediction_label_col: str = setting(
        "The column of the class as a word that a classification adds where the label is a column of strings "
        '(vocabulary=); "": none.',
        "prediction_label",
        resume="any",
    )
    label_index_col: str = setting(
        "A column of the index of the label's word, which the model adds where the data has the label, a column of "
        'strings: Spark\'s evaluators compare it with the predictions; "": none.',
        "",
        resume="any",
    )
    prediction_batch_size: int | Literal["auto"] = setting(
        'Rows that the trained model is called with at once, to predict; "auto": each worker finds the size.',
        1024,
        resume="any",
    )
    prediction_device: str = setting(
        'Where the trained model predicts: "cpu", or "cuda" for the GPU of the Spark task.', "cpu", resume="any"
    )
    on_error: Literal["fail", "skip", "null", "column"] = setting(
        "What becomes of a row that can't be used (for a null, a NaN or an unknown word, say), in training and "
        'prediction, and of one for which the model raises: "fail" fails the job, "skip" leaves it out (a training '
        'counts such rows in its history and report), "null" gives it nulls as predictions, "column" also the reason '
        "in `error_col`. With these two such a row is an error in training.",
        "fail",
        resume="any",
    )
    error_col: str = setting(
        'The column that a model with on_error="column" adds: why a row has no prediction, null for all others.',
        "prediction_error",
        resume="any",
    )
    verbose: bool = setting("Whether steps and losses are shown while training.", True, resume="any")

    def __post_init__(self) -> None:
        for name in self.whole:
            object.__setattr__(self, name, as_int(getattr(self, name)))
        wrong = list(self.problems())
        if wrong:
            raise BadSetting(" ".join(wrong), settings=wrong)

    def problems(self) -> Iterator[str]:
        """Yield one sentence for each thing that is wrong. A framework adds those of its own settings."""
        yield from _columns(self)
        yield from _numbers(self)
        yield from _predictions(self)
        yield from _choices(self)

    @classmethod
    def fields(cls) -> tuple[str, ...]:
        """Return the names of the settings, the framework's own first."""
        shared = Settings.__dataclass_fields__
        return tuple(sorted((f.name for f in fields(cls)), key=lambda name: name in shared))

    @classmethod
    def no_setting(cls, names: Sequence[str]) -> BadSetting:
        """Return the error for settings that neither this class nor Gang has, each with what is probably meant."""
        known = (*cls.fields(), *Gang.fields())
        problems = (f"There is no setting {name!r}.{cls.hints.get(name) or suggest(name, known)}" for name in names)
        return BadSetting(" ".join(problems), settings=list(names))

    def inputs(self) -> dict[str, str | list[str]]:
        """Return batch column → source columns, of the features alone."""
        if isinstance(self.feature_cols, Mapping):
            return {k: v if isinstance(v, str) else list(v) for k, v in self.feature_cols.items()}
        return {FEATURES: self.feature_cols if isinstance(self.feature_cols, str) else list(self.feature_cols)}

    def label_sources(self) -> dict[str, str | list[str]]:
        """Return batch column → source columns, of the labels alone."""
        if self.label_cols is None:
            return {}
        if isinstance(self.label_cols, Mapping):
            return {k: v if isinstance(v, str) else list(v) for k, v in self.label_cols.items()}
        return {LABEL: self.label_cols if isinstance(self.label_cols, str) else list(self.label_cols)}

    def words(self) -> dict[str, Any]:
        """Return column → its words, or "learn", or how many to learn."""
        vocabulary = self.vocabulary or {}
        if isinstance(vocabulary, Mapping):
            return {k: v if isinstance(v, str | int) else tuple(v) for k, v in vocabulary.items()}
        return dict.fromkeys([vocabulary] if isinstance(vocabulary, str) else vocabulary, "learn")

    def labels(self) -> list[str]:
        """Return the label columns."""
        return [
            name
            for source in self.label_sources().values()
            for name in ([source] if isinstance(source, str) else source)
        ]

    @property
    def keeps_checkpoints(self) -> bool:
        """Whether checkpoints are written also where the user has named no run directory."""
        return False

    # ---- what a framework overrides for its own settings

    def gang_framework(self, framework: Any) -> Any:
        """Return the `framework` of the gang, a name or a Framework with settings; that of these settings for None."""
        return framework or self.framework

    def travelling(self: S) -> S:
        """Return the settings as they are sent to the ranks."""
        return self

    def check_gang(self, gang: Gang) -> None:
        """Raise BadSetting when a gang can't train with these settings."""
        for ranks in range(gang.least, gang.most + 1):
            self.check_ranks(ranks)

    def check_ranks(self, ranks: int) -> None:
        """Raise BadSetting when a gang of this many ranks can't train with these settings."""

    def more_sources(self) -> Mapping[str, tuple[str, str | list[str], str]]:
        """Return batch column → (role in messages, source columns, dtype), beside features, labels and weights."""
        return {}

    @property
    def together(self) -> str | None:
        """A column: rows with equal values of it go to one rank, and are all trained on or all validated on."""
        return None

    def nan_by_column(self) -> Any:
        """Return what becomes of a NaN: the `nan` of `tr.Data`."""
        return self.nan

    @property
    def dtype_of_features(self) -> str | None:
        """The dtype of all features. None: as they are, but float32 where they are floats or packed."""
        return None

    @property
    def exchange_order(self) -> Any:
        """What the exchange prepares: the `shuffle` of `tr.Data`."""
        return "full"

    def metric_names(self) -> Sequence[str]:
        """Return the names that metrics have in the history."""
        return ()

    def is_of_one_score(self, label: str = LABEL) -> bool:
        """Return whether the loss of this label compares one score a row with 0 or 1."""
        return False

    def is_by_class(self) -> bool:
        """Return whether the loss compares a score for each class with a class index."""
        return False

    @property
    def tries(self) -> bool:
        """Whether the model is tried on rows of zeros before anything starts."""
        return True

    def gives_probabilities(self) -> bool:
        """Return whether the loss takes probabilities, so that the model's outputs are probabilities, not scores."""
        return False

    def has_own_step(self) -> bool:
        """Return whether the user's code computes the loss, so that nothing is known of it."""
        return False


def labels_are_names(columns: Any) -> bool:
    """Return whether `label_cols` is a column, a list of columns, or a mapping from names to these."""
    values = list(columns.values()) if isinstance(columns, Mapping) else [columns]
    return bool(values) and all(is_names(value) for value in values)


def _columns(settings: Settings) -> Iterator[str]:
    for name, columns in (("feature_cols", settings.feature_cols), ("label_cols", settings.label_cols)):
        if columns is None and name == "label_cols" and not settings.needs_label:
            continue
        if not labels_are_names(columns):
            yield f"{name}={columns!r} must be a column, or a list of columns, or a mapping from names to these."
            return
    for taken in sorted({*settings.label_sources(), WEIGHT} & set(settings.inputs())):
        yield f"feature_cols names an input {taken!r}, as a batch calls another column; choose another name."
    if WEIGHT in settings.label_sources():
        yield f"label_cols names a label {WEIGHT!r}, as a batch calls another column; choose another name."
    yield from _codings(settings)
    if settings.pad is not None and not isinstance(settings.pad, Mapping):
        yield f"pad={settings.pad!r} must be a mapping from array columns to lengths, or to (length, number)."
    if settings.weight_col is not None and not isinstance(settings.weight_col, str):
        yield f"weight_col={settings.weight_col!r} must be the name of one column."


def _predictions(settings: Settings) -> Iterator[str]:
    columns: dict[str, str] = {}
    for name in (*PREDICTION_COLUMNS, "error_col", "prediction_device"):
        value = getattr(settings, name)
        if not isinstance(value, str) or not (value or name in PREDICTION_COLUMNS[2:]):
            yield f"{name}={value!r} must be a {'device' if name == 'prediction_device' else 'column'}, as a string."
        elif name != "prediction_device" and value and (other := columns.setdefault(value, name)) != name:
            yield f"{other} and {name} are both {value!r}; they are two columns."


def _numbers(settings: Settings) -> Iterator[str]:
    for name in ("prediction_batch_size", "decode_threads"):
        value = getattr(settings, name)
        if not is_whole(value, 1) and not (name == "prediction_batch_size" and value == "auto"):
            yield f"{name}={getattr(settings, name)!r} must be a whole number of at least 1."
    if not is_whole(settings.seed, 0):
        yield f"seed={settings.seed!r} must be a whole number of at least 0."
    part = settings.validation
    if isinstance(part, bool | int | float) and not (is_number(part) and 0 < part < 1):
        yield f"validation={part!r} must be a fraction between 0 and 1, a boolean column, or a DataFrame."
    group = settings.validation_group
    if group is not None and not isinstance(group, str):
        yield f"validation_group={group!r} must be the name of one column."
    elif group is not None and not is_number(part):
        kind = repr(part) if part is None or isinstance(part, str) else "a DataFrame"
        yield (
            f"validation_group={group!r} says which rows a validation fraction draws together, and validation is "
            f"{kind}. Give a fraction, such as validation=0.2, or leave validation_group out."
        )


def _codings(settings: Settings) -> Iterator[str]:
    nulls = {} if settings.nulls is None else settings.nulls
    if not isinstance(nulls, Mapping) or not all(
        isinstance(k, str) and (is_number(v) or isinstance(v, str)) for k, v in nulls.items()
    ):
        yield f"nulls={nulls!r} must be a mapping from columns to numbers or words."
    elif "mask" in nulls.values():
        yield "nulls: a mask needs tr.launch and tr.Data."
    words = settings.vocabulary
    if words is not None and not isinstance(words, Mapping) and not is_names(words):
        yield f"vocabulary={words!r} must be a mapping from columns to their words, or a list of columns to learn from."
    for column, wanted in words.items() if isinstance(words, Mapping) else ():
        if isinstance(wanted, str) and wanted != "learn":
            yield f'vocabulary={{{column!r}: {wanted!r}}} must be a list of words, a number of them, or "learn".'
        elif not isinstance(wanted, str | Sequence) and not is_whole(wanted, 1):
            yield f"vocabulary={{{column!r}: {wanted!r}}} must be a list of words, or a number of at least 1."
        elif is_whole(wanted, 1) and settings.unknown_words == "error":
            yield (
                f"vocabulary={{{column!r}: {wanted}}} takes the most frequent words, and any other would be an error: "
                'give unknown_words="keep", by which all others have one more index, or "learn" for all words.'
            )
    yield from _normalize(settings.normalize)
    for name in ("hash_buckets", "decode"):
        value = getattr(settings, name)
        if value is not None and not isinstance(value, Mapping):
            yield f"{name}={value!r} must be a mapping from columns."
    for column, function in settings.decode.items() if isinstance(settings.decode, Mapping) else ():
        if not callable(function) and not is_dataset(function):
            yield f"decode={{{column!r}: {shown_decode(function)}}} {NO_DECODE}"
        elif callable(function) and not takes(function, 1):
            arguments = ", ".join(argument_names(function)) or "nothing"
            yield f"decode={{{column!r}: {name_of(function)}}} takes {arguments}; it is called with (value)."


def _normalize(normalize: Any) -> Iterator[str]:
    pairs = normalize.values() if isinstance(normalize, Mapping) else ()
    if not isinstance(normalize, bool | Mapping | None) and not is_names(normalize):
        yield f"normalize={normalize!r} must be True, a list of columns, or a mapping from column to (mean, deviation)."
    elif not all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in pairs):
        yield f"normalize={normalize!r} must have (mean, standard deviation) for each column."


def _choices(settings: Settings) -> Iterator[str]:
    for name, choices in settings.choices.items():
        value = getattr(settings, name)
        if not any(value is choice or (isinstance(value, str) and value == choice) for choice in choices):
            hint = did_you_mean(str(value), [c for c in choices if isinstance(c, str)])
            yield f"{name}={value!r} is unknown; choose one of {', '.join(map(repr, choices))}.{hint}"

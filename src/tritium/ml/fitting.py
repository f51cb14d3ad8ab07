"""From a frame to a trained model: check everything, start the gang, restore the model (driver)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from tritium.data.schema import Data, Field
from tritium.data.types import is_spark
from tritium.errors import BadSetting
from tritium.frameworks import find
from tritium.gang.driver import launch
from tritium.gang.settings import Gang
from tritium.ml.backend import Backend
from tritium.ml.columns import (
    Columns,
    as_frame,
    find_columns,
    maybe_classes,
    refuse_other_types,
    task_of,
    whole_numbers,
)
from tritium.ml.dry_run import same_random_state
from tritium.ml.normalize import with_means
from tritium.ml.peek import peek
from tritium.ml.row_shapes import with_shapes
from tritium.ml.settings import LABEL, PREDICTION_COLUMNS, Settings
from tritium.ml.validation import split
from tritium.ml.vocabulary import with_words
from tritium.model.engines.torch_defaults import torch_defaults
from tritium.model.model import Model
from tritium.model.signature import Activation, Input, Output, Signature, check_classes
from tritium.shown import changed_fields, shown

S = TypeVar("S", bound=Settings)


@dataclass(frozen=True)
class Plan:
    """A training that has passed every check that needs no data."""

    backend: Backend[Any]
    settings: Any
    """Those that were given, with the task that was found."""
    gang: Gang
    schema: Any
    columns: Columns
    fields: dict[str, Field]
    data: dict[str, Data]
    facts: Any
    """The result of the dry run, for the ranks."""
    notes: tuple[str, ...] = ()
    """Lines for the user."""

    @property
    def reads(self) -> tuple[Any, ...]:
        """A key that is equal for trainings which read the same rows in the same way, and so can share an exchange."""
        validation = self.settings.validation
        drawn = (validation, self.settings.seed, self.settings.validation_group)
        chosen = drawn if isinstance(validation, float | str) else (id(validation),)
        keys = repr(self.settings.row_key)
        return (repr(self.columns), self.gang.ranks, repr(self.settings.exchange_order), keys, *chosen)


def combined(kind: type[S], settings: S | None, gang: Gang | None, fields: Mapping[str, Any]) -> tuple[S, Gang]:
    """Return the settings of this kind and the gang, with the fields given beside them. Raises BadSetting."""
    of_kind = {name: value for name, value in fields.items() if name in kind.fields()}
    rest = {name: value for name, value in fields.items() if name not in of_kind}
    if unknown := [name for name in rest if name not in Gang.fields()]:
        raise kind.no_setting(unknown)
    if settings is None:
        required = {f.name for f in dataclasses.fields(kind) if f.default is dataclasses.MISSING}
        if missing := [name for name in kind.fields() if name in required and name not in of_kind]:
            raise BadSetting(f"{', '.join(missing)} must be given.", settings=missing)
        settings = kind(**of_kind)
    elif of_kind:
        settings = dataclasses.replace(settings, **of_kind)
    gang = Gang.of(gang, rest)
    named = find(gang.framework)
    if not kind.framework:
        return settings, gang
    if named is not None and named.name != kind.framework:
        raise BadSetting(
            f"framework={named.name!r} is not that of this estimator, which trains with {kind.framework}. Leave it "
            "out.",
            setting="framework",
        )
    return settings, dataclasses.replace(gang, framework=settings.gang_framework(gang.framework))


@torch_defaults()
def prepare(backend: Backend[S], frame: Any, settings: S, gang: Gang) -> Plan:
    """Check everything that can be checked without data. Raises BadData and BadSetting."""
    settings.check_gang(gang)
    frame, settings = as_frame(frame, "train", settings.nulls), backend.loaded(settings)
    if gang.on == "cluster" and not is_spark(frame):
        raise BadSetting(
            'A pandas or Arrow table needs no cluster: on="driver" trains on it with processes of this machine. To '
            "train on the cluster, give spark.createDataFrame(…) of it."
        )
    if gang.on != "cluster" and is_spark(frame):
        raise BadSetting(f'on="{gang.on}" takes pandas and Arrow tables; give df.toPandas() if the rows fit here.')
    columns = find_columns(frame, settings)
    rows = split(frame, settings)
    if (learnt := with_words(rows.words, settings)) is not settings:
        settings, columns = learnt, find_columns(frame, learnt)
    columns = with_means(rows.training, settings, columns)
    fields = {field.name: field for field in columns.fields(frame, "train")}
    with same_random_state():
        shaped = with_shapes(frame, fields, settings)
        known = {name: field.shape for name, field in shaped.items() if field.shape is not None}
        dry_run = backend.dry_run(settings, shaped, known)
    task, guess = task_of(settings, frame, dry_run.scores)
    settings = dataclasses.replace(settings, task=task)
    refuse_taken(settings, frame)
    if task == "classification" and dry_run.outputs is not None:
        check_classes(dry_run.outputs)
    as_classes = maybe_classes(columns, frame, settings, dry_run.scores)
    if as_classes.class_label is not None:
        columns = as_classes
        counted = whole_numbers(frame, as_classes.class_label, settings)
        fields = {field.name: field for field in columns.fields(counted, "train")}
        shaped[LABEL], known[LABEL] = fields[LABEL], ()
    labels = {name: shaped[name] for name in settings.label_sources()}
    with same_random_state():
        facts = dry_run.train(settings, labels, {name: known.get(name) for name in labels})
    data = rows.data(columns.data(rows.frame, settings))
    if rows.other is not None:
        refuse_other_types(columns, frame, rows.other, settings)
        data["validation"] = columns.data(rows.other, settings)
    return Plan(
        backend,
        settings,
        gang,
        frame.schema,
        columns,
        fields,
        data,
        facts,
        (*((guess,) if guess else ()), *dry_run.notes),
    )


def refuse_taken(settings: Settings, frame: Any) -> None:
    """Raise BadSetting where the frame has a column that the model would add, as `transform` would after the training.

    settings : with the task of the predictions.
    """
    of_words = any(label in settings.words() for label in settings.labels())
    count = 1 if settings.task != "classification" else len(PREDICTION_COLUMNS) if of_words else 3
    added = {name: getattr(settings, name) for name in PREDICTION_COLUMNS[:count]}
    added |= {"error_col": settings.error_col} if settings.on_error == "column" else {}
    present = {name.lower() for name in frame.schema.names}  # Spark compares names so.
    taken = {setting: name for setting, name in added.items() if name.lower() in present}
    if taken:
        other = ", ".join(f"{setting}='another_{name}'" for setting, name in taken.items())
        raise BadSetting(
            f"The DataFrame has a column {', '.join(map(repr, taken.values()))} already, and the model would add one. "
            f"Drop or rename it, or give the model's another name: {other}.",
            settings=list(taken),
        )


@torch_defaults()
def run(
    plan: Plan,
    *,
    spark: Any = None,
    exchange: Any = None,
    said: Sequence[str] = (),
    ranks_given: bool = True,
    title: str = "",
) -> Model:
    """Start the gang, over this exchange if there is one, and return the model that it has trained.

    `said` are lines for the user; `title` begins each line of the training, to tell it from others.
    """
    settings, backend = plan.settings, plan.backend
    user_run_dir = plan.gang.run_dir is not None
    keeps = settings.keeps_checkpoints or user_run_dir
    identity = backend.identity(settings, list(plan.fields.values())) if keeps else None
    if not (settings.validation is None or isinstance(settings.validation, str | float)):
        settings = dataclasses.replace(settings, validation="validation")  # A DataFrame stays on the driver.
    continues = peek(str(plan.gang.run_dir), settings, identity) if user_run_dir and identity else None
    forgotten = [] if ranks_given else free_slots(plan.gang, plan.data["train"].frame)
    ended = launch.start(
        backend.train,
        plan.gang,
        args=(settings.travelling(), "validation" in plan.data, plan.facts, user_run_dir, identity),
        data=plan.data if exchange is None else exchange,
        spark=spark,
        notes=[*said, *plan.notes, *forgotten, *([continues] if continues else [])],
        title=title,
        training={name: shown(value) for name, value in changed_fields(settings).items()},
        describe=lambda results: signature(plan, results[0]).described(),
    )
    seen = ended.result()[0]
    history = seen["history"]
    if settings.on_error == "skip":
        history = [{**entry, "rows_skipped": rows_skipped(ended.report)} for entry in history]
    model = backend.restore(settings, ended.run_dir, signature(plan, seen), history)
    functions = settings.decode or {}
    model.decode = {i.name: functions[i.columns[0]] for i in model.signature.inputs if i.columns[0] in functions}
    return model


def rows_skipped(report: Mapping[str, Any]) -> int:
    """Return how many of the rows to train on were left out, by the report of the run."""
    return sum(int(rank.get("shards", {}).get("train", {}).get("skipped", 0)) for rank in report.get("ranks", ()))


def free_slots(gang: Gang, frame: Any) -> list[str]:
    """Return a line for the user where the default of one rank leaves slots of the cluster unused, else nothing."""
    if gang.on != "cluster" or gang.ranks != 1 or not is_spark(frame):
        return []
    from tritium.spark.cluster import cluster_of

    cluster = cluster_of(frame.sparkSession)
    slots = None if cluster.starts_one_by_one else cluster.slots(gang)
    if slots is None or slots < 2:
        return []
    return [f"one rank, as ranks= was not given, on a cluster with {slots} slots: ranks={slots} trains on all of them"]


def signature(plan: Plan, seen: Mapping[str, Any]) -> Signature:
    """Return the signature of the model from the inputs and outputs that rank 0 saw."""
    inputs = []
    for name in plan.settings.inputs():
        dtype, shape = seen["inputs"][name]
        planned = plan.fields[name]
        # What a function decodes is known by the arrays that the ranks saw.
        planned = dataclasses.replace(planned, dtype=dtype) if planned.kind == "bytes" else planned
        inputs.append(Input.of(planned, plan.schema, tuple(shape)))
    outputs = [Output(name, dtype, tuple(shape)) for name, (dtype, shape) in seen["outputs"].items()]
    activation: Activation | None = "none" if plan.settings.gives_probabilities() else None
    task = None if plan.settings.task == "auto" else plan.settings.task
    words = plan.settings.words()
    return Signature(
        tuple(inputs),
        tuple(outputs),
        task=task,
        activation=activation if task == "classification" else None,
        label_words={column: words[column] for column in plan.settings.labels() if column in words},
    )

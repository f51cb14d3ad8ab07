"""From a frame to a trained model: check, start the gang, bring the weights back (driver)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import fsspec  # type: ignore[import-untyped]
import torch

from tritium.data.schema import Data, Field
from tritium.errors import BadSetting
from tritium.gang.driver import launch
from tritium.gang.settings import Gang, showing
from tritium.ml import columns as frames
from tritium.ml.settings import LABEL, TorchSettings, name_of, no_setting
from tritium.ml.torch import dry_run as trial
from tritium.ml.torch import resume
from tritium.ml.torch.loop import WEIGHTS, train
from tritium.model import weights
from tritium.model.model import Model
from tritium.model.signature import Activation, Input, Output, Signature

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from tritium.ml.keywords import TorchKeywords


@dataclass(frozen=True)
class Plan:
    """A training that has passed every check that needs no data."""

    settings: TorchSettings
    gang: Gang
    schema: Any
    columns: frames.Columns
    fields: dict[str, Field]
    data: dict[str, Data]
    unused: bool
    """Whether some parameters got no gradient in the trial, or may get none."""
    tried: bool = True
    """Whether the trial has seen the module's output. Without, the length of an array column was not known."""
    notes: tuple[str, ...] = ()
    """Lines for the person who waits."""

    @property
    def reads(self) -> tuple[Any, ...]:
        """Equal for trainings that read the same rows and columns in the same way: they can share an exchange."""
        validation = self.settings.validation
        chosen = (validation, self.settings.seed) if isinstance(validation, float) else (id(validation), None)
        return (repr(self.columns), self.gang.ranks, repr(self.settings.shuffle), *chosen)


@showing(TorchSettings, Gang)
def fit(
    frame: Any,
    settings: TorchSettings | None = None,
    gang: Gang | None = None,
    *,
    spark: Any = None,
    **fields: Unpack[TorchKeywords],
) -> Model:
    """Train on a Spark DataFrame, or with `on="driver"` and `on="here"` on a pandas DataFrame or a pyarrow Table.

    The fields of TorchSettings and of Gang can be given directly as keywords. The model that comes back knows no
    Spark; `TorchEstimator.fit` wraps it as a Spark ML transformer.

    Raises SetupError before anything has started, DataError for what only the rows could show, TrainingDiverged for a
    loss or gradients that are NaN or infinite, RankFailed for an exception in a rank.
    """
    ranks_given = gang is not None or "ranks" in fields
    settings, gang = combined(settings, gang, fields)
    return run(prepare(frame, settings, gang), spark=spark, ranks_given=ranks_given)


def combined(
    settings: TorchSettings | None, gang: Gang | None, fields: Mapping[str, Any]
) -> tuple[TorchSettings, Gang]:
    """Settings and gang with the fields given beside them."""
    own = {name: value for name, value in fields.items() if name in TorchSettings.fields()}
    rest = {name: value for name, value in fields.items() if name not in own}
    if unknown := [name for name in rest if name not in Gang.fields()]:
        raise no_setting(unknown)
    if settings is None:
        needed = [f.name for f in dataclasses.fields(TorchSettings) if f.default is dataclasses.MISSING]
        if missing := [name for name in needed if name not in own]:
            raise BadSetting(f"{', '.join(missing)} must be given.", settings=missing)
        settings = TorchSettings(**own)
    elif own:
        settings = dataclasses.replace(settings, **own)
    gang = Gang.of(gang, rest)
    return settings, gang if gang.framework else dataclasses.replace(gang, framework="torch")


def prepare(frame: Any, settings: TorchSettings, gang: Gang) -> Plan:
    """Everything that can be checked without data. Raises BadData and BadSetting."""
    for ranks in range(gang.least, gang.most + 1):
        settings.rows_per_rank(ranks)
    frame = frames.as_frame(frame, "train")
    if gang.on == "cluster" and not frames.is_spark(frame):
        raise BadSetting(
            'A pandas or Arrow table needs no cluster: on="driver" trains on it with processes of this machine. To '
            "train on the cluster, give spark.createDataFrame(…) of it."
        )
    if gang.on != "cluster" and frames.is_spark(frame):
        raise BadSetting(f'on="{gang.on}" takes pandas and Arrow tables; give df.toPandas() if the rows fit here.')
    found = frames.columns(frame, settings)
    fields = {field.name: field for field in found.fields(frame, "train")}
    shapes = {name: frames.row_shape(frame, field) for name, field in fields.items()}
    known = {name: shape for name, shape in shapes.items() if shape is not None}
    tried = trial.try_forward(settings, fields, known) if set(settings.inputs()) <= set(known) else None
    scores = None if tried is None else tried.scores
    task, guess = frames.task_of(settings, frame, scores)
    settings = dataclasses.replace(settings, task=task)
    as_classes = frames.maybe_classes(found, frame, settings, scores)
    if as_classes.class_label is not None:
        found = as_classes
        counted = frames.whole_numbers(frame, as_classes.class_label)
        fields = {field.name: field for field in found.fields(counted, "train")}
        known[LABEL] = ()
    if tried is not None:
        trial.try_scheduler(settings, trial.try_optimizer(settings, tried.module))
    unused = True  # as nobody knows it yet
    if tried is not None and LABEL in known:
        if settings.train_step is None:
            unused = bool(trial.try_step(settings, tried, fields[LABEL], known[LABEL]))
        else:
            unused = trial.try_own_step(settings, tried, fields[LABEL], known[LABEL])
    training, validation = frames.split(frame, settings)
    data = {"train": found.data(training, settings)}
    if validation is not None:
        frames.columns(validation, settings)
        data["validation"] = found.data(validation, settings)
    return Plan(settings, gang, frame.schema, found, fields, data, unused, tried is not None, (guess,) if guess else ())


def run(
    plan: Plan,
    *,
    spark: Any = None,
    exchange: Any = None,
    said: Sequence[str] = (),
    ranks_given: bool = True,
    title: str = "",
) -> Model:
    """Start the gang, over this exchange if there is one, and make a model of what it leaves behind.

    `said` are lines for who waits; `title` is what each line begins with, to tell this training from others.
    """
    settings = plan.settings
    named = plan.gang.run_dir is not None
    now = None if settings.checkpoint_every is None and not named else resume.planned(settings, plan.fields.values())
    if not (settings.validation is None or isinstance(settings.validation, str | float)):
        settings = dataclasses.replace(settings, validation="validation")  # a DataFrame stays on the driver
    begun = resume.look(str(plan.gang.run_dir), settings, now) if named and now is not None else None
    forgotten = [] if ranks_given else free_slots(plan.gang, plan.data["train"].frame)
    ended = launch.start(
        train,
        plan.gang,
        args=(settings, "validation" in plan.data, plan.unused, named, now, plan.tried),
        data=plan.data if exchange is None else exchange,
        spark=spark,
        said=[*said, *plan.notes, *forgotten, *([begun] if begun else [])],
        title=title,
    )
    seen = ended.results[0]
    module = settings.make_module()
    with fsspec.open(f"{ended.run_dir}/{WEIGHTS}", "rb") as file:
        module.load_state_dict(weights.read(bytearray(file.read())))
    module.eval()
    origin = None if isinstance(settings.model, torch.nn.Module) else settings.model
    return Model(module, signature(plan, seen), history=seen["history"], origin=origin, seed=settings.seed)


def free_slots(gang: Gang, frame: Any) -> list[str]:
    """A line where nobody has said how many ranks there shall be, and there is room for several."""
    if gang.on != "cluster" or gang.ranks != 1 or not frames.is_spark(frame):
        return []
    from tritium.gang.driver.cluster import Cluster

    cluster = Cluster.of(frame.sparkSession)
    slots = None if cluster.is_dynamic else cluster.slots(gang)
    if slots is None or slots < 2:
        return []
    return [f"one rank, as ranks= was not given, on a cluster with {slots} slots: ranks={slots} trains on all of them"]


def signature(plan: Plan, seen: Mapping[str, Any]) -> Signature:
    """What the model takes and gives, as rank 0 saw it."""
    inputs = [
        Input.of(plan.fields[name], plan.schema, tuple(seen["inputs"][name][1])) for name in plan.settings.inputs()
    ]
    outputs = [Output(name, dtype, tuple(shape)) for name, (dtype, shape) in seen["outputs"].items()]
    gives_probabilities = name_of(plan.settings.loss) in ("BCELoss", "binary_cross_entropy")
    activation: Activation | None = "none" if gives_probabilities else None
    task = None if plan.settings.task == "auto" else plan.settings.task
    return Signature(
        tuple(inputs), tuple(outputs), task=task, activation=activation if task == "classification" else None
    )

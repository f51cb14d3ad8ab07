"""The training with LightGBM (rank)."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import lightgbm
import numpy as np

from tritium.checkpoint.training import TrainingCheckpoint
from tritium.errors import BadData, EmptyShard
from tritium.frameworks.lightgbm import joined
from tritium.gang.rank.world import World
from tritium.gang.rank.world import world as this_world
from tritium.ml.lightgbm.average import add_average, average_score
from tritium.ml.lightgbm.bins import is_shared, training_set, validation_set
from tritium.ml.lightgbm.callbacks import BoostingCallbacks
from tritium.ml.lightgbm.checkpoint import BoostingState, checkpoint_of
from tritium.ml.lightgbm.labels import check_labels, check_scores
from tritium.ml.lightgbm.metrics import Metrics
from tritium.ml.lightgbm.parameters import lightgbm_params
from tritium.ml.lightgbm.rows import ShardRows
from tritium.ml.lightgbm.settings import LightGBMClassifierSettings, LightGBMSettings

basic: Any = lightgbm.basic
WEIGHTS = "model.txt"
_PIECE = 4 << 20
_LARGE_CATEGORY = 1 << 20  # A split by it keeps 128 KiB.
_DROPPED = 'iteration {} found no split, and ends the training: LightGBM can\'t put back what "dart" has dropped for it'
_LOG_SECONDS = 0.5
_MOST_CLASSES = 10_000
_TURNED = r"(?<=\n)(shrinkage|leaf_value|internal_value)=(.*)"
_SPECIAL = re.compile(r'[",:\[\]{}\s]')  # LightGBM refuses feature names with these.


def train(
    settings: LightGBMSettings,
    validate: bool,
    facts: Mapping[str, tuple[str, ...]] | None,
    user_run_dir: bool = False,
    identity: dict[str, Any] | None = None,
) -> dict[str, Any] | None:
    """Train on this rank's shards. Rank 0 stores the model, and returns history, inputs and outputs; others None.

    facts        : the slots of each batch column, as the dry run returns them.
    user_run_dir : whether the user named the run directory; a training that was begun there then continues.
    identity     : the facts that must be equal for that, to be kept in the checkpoints.
    """
    world = this_world()
    rows, validation = _rows(world, "train", settings, facts or {}), None
    if validate:
        validation = _rows(world, "validation", settings, facts or {})
    assert rows is not None
    check_labels(world, rows, validation, settings)
    classes = _classes(world, rows, validation, settings)
    check_scores(rows, classes, settings)
    progress = BoostingState(settings, world)
    checkpoint = checkpoint_of(settings, world, progress, identity, run_dir_required=user_run_dir)
    checkpoint.load()
    checkpoint.restore()
    if progress.iteration < checkpoint.rounds:
        _grow(world, settings, rows, validation, classes, progress, checkpoint)
        checkpoint.finish(progress.iteration)
    if world.rank != 0:
        return None
    text = progress.model()
    world.store(WEIGHTS, (text[start : start + _PIECE] for start in range(0, len(text), _PIECE)))
    outputs = [classes] if classes is not None and progress.booster.num_model_per_iteration() > 1 else []
    return {
        "history": progress.history,
        "inputs": {name: (dtype, list(shape)) for name, (dtype, shape) in rows.inputs.items()},
        "outputs": {"prediction": ("float64", outputs)},
    }


def _grow(
    world: World,
    settings: LightGBMSettings,
    rows: ShardRows,
    validation: ShardRows | None,
    classes: int | None,
    progress: BoostingState,
    checkpoint: TrainingCheckpoint,
) -> None:
    """Add trees until there are enough, or early stopping or a callback ends the training."""
    with ExitStack() as network:
        booster, average = _booster(world, settings, rows, validation, classes, progress, network)
        if world.rank == 0 and rows.largest_category >= _LARGE_CATEGORY:
            world.note(
                f"categories go up to {rows.largest_category:,}, and a split by them keeps a bit for each number up to "
                "the largest: number them from 0 (StringIndexer) for a small and fast model"
            )
        metrics = Metrics(world, rows if settings.training_metric else None, validation)
        callbacks = BoostingCallbacks(settings.callbacks, world, settings.num_iterations)
        progress.booster, logged = booster, 0.0
        for iteration in range(progress.iteration, settings.num_iterations):
            began = time.monotonic()
            callbacks.before(booster, iteration)
            finds_no_split = booster.update()  # Then it adds no tree, and a later iteration may find a split.
            if finds_no_split and settings.boosting == "dart" and (whole := _with_dropped(booster)) is not None:
                progress.booster = whole
                if world.rank == 0:
                    world.note(_DROPPED.format(iteration + 1))
                break
            progress.iteration = iteration + 1
            if progress.iteration == 1 and average is not None:
                progress.added = add_average(booster, average)
            metric_values: dict[str, Any] = metrics.of(booster)
            now = time.monotonic()
            names = [name.removeprefix("validation_") for name in metric_values]
            trees = booster.current_iteration()
            entry = {"iteration": progress.iteration, "trees": trees, **metric_values, "seconds": now - began}
            progress.add(entry, list(dict.fromkeys(names)))
            progress.ended = callbacks.after(booster, iteration, metric_values)
            stops = progress.early_stopping.should_stop or progress.ended is not None
            ends = stops or progress.iteration == settings.num_iterations
            if settings.verbose and (ends or now - logged >= _LOG_SECONDS):
                world.log(step=iteration, steps=settings.num_iterations, **metric_values)
                logged = now
            if stops:
                break
            if checkpoint.save(progress.iteration):
                checkpoint.regroup(progress.iteration)
        if world.rank == 0:
            _note_splits(world, settings, progress, booster)


def _note_splits(world: World, settings: LightGBMSettings, progress: BoostingState, booster: lightgbm.Booster) -> None:
    """Tell the user of iterations that have found no split."""
    if skipped := progress.iteration - booster.current_iteration():
        world.note(f"{skipped} of {progress.iteration} iterations found no split, and added no tree")
    empty = booster.model_to_string(num_iteration=-1).count("\nnum_leaves=1\n") if settings.boosting == "rf" else 0
    if empty:
        world.note(
            f"{empty} of {booster.num_trees()} trees of this forest found no split. LightGBM averages a 0 for each, so "
            "predictions are too near to 0: lower min_data_in_leaf or min_gain_to_split, or draw more rows and features"
        )


def _booster(
    world: World,
    settings: LightGBMSettings,
    rows: ShardRows,
    validation: ShardRows | None,
    classes: int | None,
    progress: BoostingState,
    network: ExitStack,
) -> tuple[lightgbm.Booster, float | None]:
    """Return the booster over the rows of all ranks, which are connected in `network`, and its initial score.

    Its first trees are those of the booster of `progress`, where a checkpoint has left one. The score is the average
    that is to be added to the first tree; None: it begins with another score, or LightGBM adds it.
    """
    before, done = progress.booster, progress.iteration
    counts = world.shard("train").counts
    params = lightgbm_params(settings, rows.features, classes, world.size)
    connection: dict[str, Any] = {}
    verbosity = int(params["verbosity"])
    average = None if before is not None or rows.init_score is not None else average_score(world, rows, params)
    shared = is_shared(params, rows.width, counts)
    if not shared:
        connection = network.enter_context(joined(world, verbosity))
    data = training_set(rows, params, counts, world, _feature_names(rows.features.names))
    if shared:
        connection = network.enter_context(joined(world, verbosity))
    valid = None if validation is None else validation_set(validation, data, params)
    for part, dataset in ((rows, data), (validation, valid)):
        if part is not None and dataset is not None and (scores := _scores(part, before, average)) is not None:
            dataset.set_init_score(scores)
    if done:  # Else the same rows and features would be drawn as in the first iterations.
        params["seed"] = (int(params["seed"]) + done) % (1 << 31)
    booster = lightgbm.Booster({**params, **connection}, data)
    if before is not None:
        basic._safe_call(basic._LIB.LGBM_BoosterMerge(booster._handle, before._handle))
    if valid is not None:
        booster.add_valid(valid, "validation")
    return booster, average


def _scores(rows: ShardRows, before: lightgbm.Booster | None, average: float | None) -> Any:
    """Return the scores from which a training begins, [rows] or [rows, classes]; None: from LightGBM's average."""
    initial = rows.init_score
    if before is None:
        return initial if average is None else np.full(rows.count, average)
    raw = np.concatenate([before.predict(batch, raw_score=True) for batch in rows.batches()])
    return raw if initial is None else raw + initial.reshape(raw.shape)


def _rows(
    world: World, name: str, settings: LightGBMSettings, slots: Mapping[str, tuple[str, ...]]
) -> ShardRows | None:
    """Return the rows of this rank; None for a rank without rows to validate on. Raises EmptyShard on every rank."""
    shard = world.shard(name)
    counts = shard.counts
    listed = ", ".join(map(str, counts[:64]))
    if not any(counts):
        fix = "Give a larger fraction" if isinstance(settings.validation, float) else "Look at what it holds"
        what = f"to {'train' if name == 'train' else 'validate'} on"
        raise EmptyShard(f"There are no rows {what} (rows per rank: {listed}). {fix}.", counts=list(counts))
    if name == "train" and 0 in counts:
        what = "all rows of a group are on one rank" if settings.together else "rows are dealt evenly"
        raise EmptyShard(
            f"Rank {counts.index(0)} of {len(counts)} received no rows (rows per rank: {listed}); {what}. "
            "Ask for fewer ranks.",
            counts=list(counts),
        )
    return ShardRows(shard, settings, slots) if shard.rows else None


def _classes(world: World, rows: ShardRows, validation: ShardRows | None, settings: LightGBMSettings) -> int | None:
    """Return the number of classes, the same on every rank; None where none are predicted. Raises BadData."""
    if not isinstance(settings, LightGBMClassifierSettings):
        return None
    labels_here = [np.unique(part.label)[:_MOST_CLASSES] if part is not None else () for part in (rows, validation)]
    gathered = world.gather([list(map(int, labels)) for labels in labels_here])
    trained = sorted({label for labels, _ in gathered for label in labels})
    others = sorted({label for _, labels in gathered for label in labels})
    column = settings.labels()[0]
    count = settings.num_class or trained[-1] + 1
    advice = "Number the classes 0, 1, 2, … (StringIndexer does), or give num_class= where some may be missing."
    if trained[0] < 0 or count > _MOST_CLASSES:
        raise BadData(
            f"label column {column!r} holds {trained[0] if trained[0] < 0 else trained[-1]}. {advice}", column=column
        )
    beyond = [label for label in trained + others if not 0 <= label < count]
    if beyond:
        where = "rows" if beyond[0] in trained else "validation rows"
        raise BadData(
            f"label column {column!r} holds {beyond[0]} in the {where}, and there are {count} classes, from 0 on. "
            f"{advice}",
            column=column,
        )
    missing = sorted(set(range(count)) - set(trained))
    if settings.num_class is None and (missing or count < 2):
        lacks = f"no rows of class {missing[0]} and rows of class {trained[-1]}" if missing else "only class 0"
        raise BadData(f"label column {column!r} has {lacks}. {advice}", column=column)
    return count


def _feature_names(names: Sequence[str]) -> Sequence[str]:
    """Return names that LightGBM takes, each once, like those of the features."""
    plain = [_SPECIAL.sub("_", name) for name in names]
    twice: Mapping[str, int] = Counter(plain)
    return [name if twice[name] == 1 else f"{name}_{i}" for i, name in enumerate(plain)]


def _with_dropped(booster: lightgbm.Booster) -> lightgbm.Booster | None:
    """Return a booster of the trees before an iteration that has found no split; None where it is `booster` itself.

    "dart" drops some trees for an iteration by turning their signs. LightGBM 4.7 turns them back only where the
    iteration finds a split, and else goes on with a sum that lacks them: for labels around 100, predictions were around
    -200.
    """
    head, *trees = re.split(r"(?<=\n)(?=Tree=\d+\n)", booster.model_to_string(num_iteration=-1))
    if not any("\nshrinkage=-" in tree for tree in trees):
        return None
    turned = [re.sub(_TURNED, _turned, tree) if "\nshrinkage=-" in tree else tree for tree in trees]
    head = re.sub(r"(?<=\n)tree_sizes=.*\n", "", head)  # LightGBM reads a text without them.
    return lightgbm.Booster(model_str=head + "".join(turned))


def _turned(match: re.Match[str]) -> str:
    return f"{match[1]}={' '.join(repr(-float(value)) for value in match[2].split())}"

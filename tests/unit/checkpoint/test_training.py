"""The parts of a training in a checkpoint: what is equal on all ranks, what is a rank's own, what all get back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import tritium as tr
from tritium.checkpoint.identity import FORM
from tritium.checkpoint.training import Collective, Own, Shared, Stateful, TrainingCheckpoint
from tritium.errors import BadSetting
from tritium.ml.early_stopping import EarlyStopping, EarlyStoppingState
from tritium.ml.lightgbm.settings import LightGBMRegressorSettings

ROUNDS = 4
RULE = EarlyStopping(patience=2, monitor="loss")


def train(run_dir: str, ranks: int, stop_after: int, seed: int = 0, every: int | None = 1) -> list[dict[str, Any]]:
    """Train until a step, over parts of each kind; return what each rank has at the beginning and at the end."""

    def function() -> dict[str, Any]:
        world = tr.world()
        settings = LightGBMRegressorSettings(
            feature_cols=["a"], label_cols="y", num_iterations=ROUNDS, checkpoint_every=every, seed=seed
        )
        weights, own = {"w": 0.0}, {"drawn": world.rank * 10, "missing": False}
        history: list[dict[str, Any]] = []
        early_stopping = EarlyStoppingState(RULE, ROUNDS, dict, weights.update)
        everyones = Collective(lambda: own["drawn"])
        parts: dict[str, Stateful] = {
            "weights": Shared(lambda: dict(weights), weights.update),
            "drawn": Own(
                world.rank,
                lambda: own["drawn"],
                lambda kept: own.update(drawn=kept),
                missing=lambda: own.update(missing=True),
            ),
            "of this size": Own(world.rank, lambda: world.size, lambda kept: own.update(size=kept), world.size),
            "everyone's": everyones,
        }
        identity = {"form": FORM, "seed": seed}
        about = (history, early_stopping, parts)
        checkpoint = TrainingCheckpoint(world, settings, {"identity": identity}, *about, run_dir_required=True)
        checkpoint.load()
        restored = checkpoint.restore()
        begun = {"restored": restored, "everyone's": everyones.restored, "weights": weights["w"], **own}
        for step in range(checkpoint.step + 1, min(stop_after, checkpoint.rounds) + 1):
            weights["w"] += step
            own["drawn"] += 1
            history.append({"loss": 1.0 / step})
            early_stopping.on_epoch_end(history[-1])
            checkpoint.save(step)
        if len(history) == ROUNDS:
            checkpoint.finish(ROUNDS)
        return {**begun, "finished": checkpoint.finished, "history": len(history), "step": checkpoint.step}

    return tr.launch(function, ranks=ranks, on="driver", run_dir=run_dir, progress=False, retries=0)  # type: ignore[no-any-return]


@pytest.mark.processes
def test_each_kind_of_part_comes_back_at_the_same_and_at_another_number_of_ranks(tmp_path: Path) -> None:
    run_dir = str(tmp_path)
    for begun in train(run_dir, 2, stop_after=2):
        assert (begun["restored"], begun["everyone's"], begun["step"]) == (False, None, 0)
    same = train(run_dir, 2, stop_after=3)
    assert [begun["weights"] for begun in same] == [1 + 2, 1 + 2]
    assert [begun["drawn"] for begun in same] == [2, 12]
    assert [begun["size"] for begun in same] == [2, 2]
    assert [begun["everyone's"] for begun in same] == [[2, 12]] * 2
    assert [begun["finished"] for begun in same] == [False, False]
    more = train(run_dir, 3, stop_after=ROUNDS)
    assert [begun["weights"] for begun in more] == [1 + 2 + 3] * 3
    assert [begun["drawn"] for begun in more] == [3, 13, 20]
    assert [begun["missing"] for begun in more] == [False, False, True]
    assert not any("size" in begun for begun in more)
    assert [begun["everyone's"] for begun in more] == [[3, 13]] * 3
    assert [(begun["finished"], begun["history"]) for begun in more] == [(True, ROUNDS)] * 3
    again = train(run_dir, 1, stop_after=ROUNDS)
    assert (again[0]["finished"], again[0]["history"], again[0]["step"]) == (True, ROUNDS, ROUNDS)


@pytest.mark.processes
def test_another_training_is_refused_and_without_checkpoints_none_is_read(tmp_path: Path) -> None:
    run_dir = str(tmp_path)
    train(run_dir, 1, stop_after=1)
    with pytest.raises(BadSetting, match="is a checkpoint of another training: seed: 1, was 0"):
        train(run_dir, 1, stop_after=2, seed=1)
    (begun,) = train(run_dir, 1, stop_after=1, every=None)
    assert not begun["restored"]

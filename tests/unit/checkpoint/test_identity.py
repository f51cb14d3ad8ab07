"""What must be equal for a training to continue: as each setting's field declares."""

from __future__ import annotations

import dataclasses
from typing import Any, get_args

import pytest

from tritium.checkpoint.identity import Resume, identity_of, refuse_another
from tritium.errors import BadSetting
from tritium.ml.function.settings import FunctionSettings
from tritium.ml.keras.settings import KerasSettings
from tritium.ml.lightgbm.settings import LightGBMClassifierSettings, LightGBMRankerSettings, LightGBMRegressorSettings
from tritium.ml.lightning.settings import LightningSettings
from tritium.ml.torch.settings import TorchSettings

SETTINGS = [
    FunctionSettings,
    KerasSettings,
    LightGBMClassifierSettings,
    LightGBMRankerSettings,
    LightGBMRegressorSettings,
    LightningSettings,
    TorchSettings,
]
COLUMNS: dict[str, Any] = {"feature_cols": ["a"], "label_cols": "y"}


@pytest.mark.parametrize("kind", SETTINGS)
def test_every_setting_declares_what_it_must_be_in_a_training_that_continues(kind: type) -> None:
    for field in dataclasses.fields(kind):
        assert field.metadata["resume"] in get_args(Resume), field.name


def test_the_same_and_any_values() -> None:
    begun = LightGBMRegressorSettings(**COLUMNS)
    free: list[dict[str, Any]] = [{"decode_threads": 4}, {"num_iterations": 7}, {"prediction_col": "p"}]
    for change in free:
        assert identity_of(dataclasses.replace(begun, **change), []) == identity_of(begun, []), change
    bound: list[dict[str, Any]] = [{"seed": 1}, {"num_leaves": 7}, {"vocabulary": {"a": ["x"]}}]
    for change in bound:
        assert identity_of(dataclasses.replace(begun, **change), []) != identity_of(begun, []), change


def test_a_checkpoint_of_another_version_is_refused_by_name() -> None:
    now = identity_of(LightGBMRegressorSettings(**COLUMNS), [])
    before = {name: value for name, value in now.items() if name != "form"}  # as it was before there were forms
    with pytest.raises(BadSetting, match=r"/runs/1 was saved by another version of Tritium: .* of form 1, and this"):
        refuse_another(before, now, "/runs/1")
    with pytest.raises(BadSetting, match="another kind"):
        refuse_another(None, now, "/runs/1")
    refuse_another(now, now, "/runs/1")

"""Numbered versions in a directory: as a whole or not at all, one number each, and rolled back by publishing."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import fsspec  # type: ignore[import-untyped]
import pytest
import torch

import tritium as tr
from tritium.errors import BadSetting, ModelError
from tritium.model.published import versions
from tritium.model.signature import Input, Output, Signature
from tritium.predict.following import seconds_of

SIGNATURE = Signature((Input("features", ("a", "b"), "float32", (2,)),), (Output("y", shape=(1,)),), "regression")


def model(bias: float) -> tr.Model:
    module = torch.nn.Linear(2, 1)
    torch.nn.init.ones_(module.weight)
    torch.nn.init.constant_(module.bias, bias)
    return tr.Model(module, SIGNATURE)


@pytest.fixture(params=["local", "memory"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """Yield a directory that does not exist: on the disk, and in a store that has no renames."""
    if request.param == "local":
        yield str(tmp_path / "models")
        return
    yield f"memory://{tmp_path.name}/models"
    fsspec.filesystem("memory").rm(f"/{tmp_path.name}", recursive=True)


def predicted(path: str) -> float:
    scores = tr.load(path, trusted=True).predict({"features": torch.ones(1, 2)})
    assert not isinstance(scores, dict)
    return float(scores[0])


def test_versions_are_numbered_and_an_earlier_one_is_published_again(place: str) -> None:
    with pytest.raises(ModelError, match="no such directory"):
        versions(place)
    assert [tr.publish(model(bias), place) for bias in (1, 2)] == [1, 2]
    assert tr.publish(f"{place}/1", place) == 3
    assert versions(place) == [3, 2, 1]
    assert [predicted(f"{place}/{number}") for number in (1, 2, 3)] == [3, 4, 3]


def test_a_version_without_its_manifest_is_not_there_and_its_number_is_not_used_again(place: str) -> None:
    tr.publish(model(1), place)
    store, root = fsspec.core.url_to_fs(place)
    store.makedirs(f"{root}/2")
    store.pipe_file(f"{root}/2/model.safetensors", b"half of it")
    assert versions(place) == [1]
    assert tr.publish(model(2), place) == 3


def test_only_so_many_versions_stay(place: str) -> None:
    for bias in (1, 2, 3):
        tr.publish(model(bias), place)
    store, root = fsspec.core.url_to_fs(place)
    store.rm_file(f"{root}/1/manifest.json")  # As a removal leaves it that was killed.
    store.pipe_file(f"{root}/2.publishing", b"")  # Another process is not done with it.
    assert tr.publish(model(4), place, keep=2) == 4
    assert versions(place) == [4, 3, 2]
    store.rm_file(f"{root}/2.publishing")
    assert tr.publish(f"{place}/3", place, keep=1) == 5
    assert [name.rpartition("/")[2] for name in store.ls(root, detail=False)] == ["5"]
    assert predicted(f"{place}/5") == 5
    for keep in (0, True, 1.5):
        with pytest.raises(BadSetting, match="keep="):
            tr.publish(model(5), place, keep=keep)  # type: ignore[arg-type]


def test_two_that_publish_at_once_get_two_numbers(place: str) -> None:
    numbers: list[int] = []
    threads = [threading.Thread(target=lambda: numbers.append(tr.publish(model(1), place))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(numbers) == [1, 2, 3, 4] == sorted(versions(place))


def test_what_is_no_model_is_refused(place: str, tmp_path: Path) -> None:
    with pytest.raises(BadSetting, match="got 3"):
        tr.publish(3, place)
    with pytest.raises(ModelError, match="No model at"):
        tr.publish(str(tmp_path / "nothing"), place)
    with pytest.raises(BadSetting, match="in MLflow's registry"):
        tr.publish(model(1), "models:/bikes@champion")
    model(1).save(place)
    with pytest.raises(BadSetting, match="is a saved model"):
        tr.publish(model(1), place)


def test_a_damaged_model_is_not_published(place: str, tmp_path: Path) -> None:
    model(1).save(str(tmp_path / "saved"))
    weights = tmp_path / "saved" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"!")
    with pytest.raises(ModelError, match="damaged"):
        tr.publish(str(tmp_path / "saved"), place)
    assert versions(place) == []
    assert tr.publish(model(1), place) in (1, 2)  # An object store may keep files of the first, without a manifest.


def test_every_is_a_time() -> None:
    assert [seconds_of(every) for every in ("30s", "500ms", "5m", 2, 0.5)] == [30, 0.5, 300, 2, 0.5]
    for every in ("30 parsecs", "s", 0, -1, True, float("inf"), None):
        with pytest.raises(BadSetting, match="every="):
            seconds_of(every)  # type: ignore[arg-type]


def test_a_model_follows_a_directory_that_exists_and_scores_pandas_with_the_newest(place: str) -> None:
    import pandas as pd

    with pytest.raises(ModelError, match="no such directory"):
        model(0).follow(place)
    tr.publish(model(1), place)
    with pytest.raises(BadSetting, match="trusted="):
        model(0).follow(place, trusted=3)
    following = model(0).follow(place)
    frame = pd.DataFrame({"a": [1.0], "b": [1.0]})
    assert following.transform(frame).model_version.tolist() == [1]
    tr.publish(model(2), place)
    scored = following.transform(frame)
    assert scored.model_version.tolist() == [2]
    assert scored.prediction.tolist() == [4]
    with pytest.raises(BadSetting, match="model_version"):
        following.transform(frame.assign(model_version=1))

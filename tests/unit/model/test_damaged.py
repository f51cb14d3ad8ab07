"""A directory that is no model, or one that lists files elsewhere. tests/fuzz damages the files themselves."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import pytest
from torch import nn

import tritium as tr
from tritium.errors import ModelError
from tritium.model.signature import Input, Output, Signature

SIGNATURE = Signature((Input("x", ("a", "b"), "float32", (2,)),), (Output("prediction", shape=(1,)),))


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    tr.Model(nn.Linear(2, 1), SIGNATURE).save(str(tmp_path / "saved"))
    return tmp_path / "saved"


def test_a_path_that_is_no_directory_of_a_model(saved: Path, tmp_path: Path) -> None:
    file = tmp_path / "model.pt"
    file.write_bytes(b"123")
    with pytest.raises(ModelError, match="that is a file, and a model is a directory"):
        tr.load(str(file))
    with pytest.raises(ModelError, match="there is nothing"):
        tr.load(str(file / "below"))
    with pytest.raises(ModelError, match="there is nothing"):
        tr.load(str(tmp_path / "missing"))
    (tmp_path / "odd" / "manifest.json").mkdir(parents=True)
    with pytest.raises(ModelError, match="an incomplete model"):
        tr.load(str(tmp_path / "odd"))
    shutil.copytree(saved, tmp_path / "m")
    weights = tmp_path / "m" / "model.safetensors"
    weights.unlink()
    weights.mkdir()
    with pytest.raises(ModelError, match=f"{weights.name} is missing"):
        tr.load(str(tmp_path / "m"), trusted=True)


def test_a_signature_by_hand_with_a_wrong_type() -> None:
    with pytest.raises(tr.errors.BadSetting, match=r"Input 'x': 'dtype' is 'floaty', and must be the name of a dtype"):
        Input("x", ("a",), "floaty")
    with pytest.raises(tr.errors.BadSetting, match=r"Input 'x': 'columns' is 'temp', and must be a list"):
        Input("x", "temp")  # type: ignore[arg-type]


def test_a_file_that_is_listed_elsewhere_is_not_copied_there(saved: Path, tmp_path: Path) -> None:
    """Publishing copies what a manifest lists: `../` would write beside the directory of versions."""
    content, manifest = b"import os", json.loads((saved / "manifest.json").read_text())
    (tmp_path / "evil.py").write_bytes(content)
    manifest["files"]["../evil.py"] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (saved / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ModelError, match=r"'files' is .*by the name of a file in this directory"):
        tr.publish(str(saved), str(tmp_path / "models"))
    assert not (tmp_path / "models").exists()

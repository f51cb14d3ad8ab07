"""The code that loading a model may run: nothing that the caller did not name, nothing of the current directory."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import nn

import tritium as tr
from tritium.errors import BadSetting, ModelError, UntrustedModel
from tritium.model.signature import Input, Output, Signature

SIGNATURE = Signature((Input("features", ("a", "b", "c"), "float32", (3,)),), (Output("y", shape=(3,)),))
X = np.arange(6, dtype="f4").reshape(2, 3)
RAN = "import pathlib; pathlib.Path({ran!r}).write_text('code of the model ran')\n"
NETS = """
import torch
from pathlib import Path

class Net(torch.nn.Identity):
    pass

class Loud(torch.nn.Identity):
    def __init__(self):
        super().__init__()
        Path({ran!r}).write_text("code of the model ran")

def make():
    return Net()

def typed() -> Net:
    return Net()

def wipe():
    Path({ran!r}).write_text("code of the model ran")
"""


@pytest.fixture
def ran(tmp_path: Path) -> Path:
    """Return the file that code writes which must not run."""
    return tmp_path / "ran"


@pytest.fixture
def installed(tmp_path: Path, ran: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Yield a folder on the path with a package `ournets`: `models`, `__init__`, a module that must not be imported."""
    home = tmp_path / "site"
    (home / "ournets").mkdir(parents=True)
    (home / "ournets" / "__init__.py").write_text("import os\n")
    (home / "ournets" / "models.py").write_text(NETS.format(ran=str(ran)))
    (home / "ournets" / "loud.py").write_text(RAN.format(ran=str(ran)))
    monkeypatch.syspath_prepend(str(home))
    before = set(sys.modules)
    yield home
    for name in set(sys.modules) - before:
        if name.partition(".")[0] in ("ournets", "strangers"):
            del sys.modules[name]


@pytest.fixture
def made_by(tmp_path: Path) -> Callable[[str], str]:
    """Return a function that writes a valid model (right checksums) that names this origin, and returns its path."""

    def write(origin: str) -> str:
        path = tmp_path / "model"
        tr.Model(nn.Identity(), SIGNATURE, origin=nn.Identity).save(str(path), overwrite=True)
        manifest = json.loads((path / "manifest.json").read_text())
        (path / "manifest.json").write_text(json.dumps({**manifest, "module": {"import": origin}}))
        return str(path)

    return write


STRANGERS = [
    "os:getcwd",
    "os:abort",
    "antigravity:geohash",
    "this:s",
    "subprocess:Popen",
    "torch:os.getcwd",
    "torch.nn:modules.module.torch.hub.list",
    "torch.nn:Module.__init__",
    "torch.nn.modules.module:OrderedDict",
    "torch.nn.modules.module:torch",
    "torch.nn.modules.linear:math.pi",
    "torch.nn.utils.rnn:warnings.resetwarnings",
    "torch.nn:factory_kwargs",
    "torch.nnevil:Net",
    "torch.hub:list",
    "ournets.models:make",
    "ournets.models:typed",
    "ournets.models:Net",
    "ournets.models:Loud",
    "ournets.models:wipe",
    "ournets.loud:x",
    "ournets:os.getcwd",
]


@pytest.mark.parametrize("origin", STRANGERS)
def test_what_nobody_named_is_neither_imported_nor_called(
    origin: str, made_by: Callable[[str], str], installed: Path, ran: Path
) -> None:
    before = set(sys.modules)
    with pytest.raises(UntrustedModel) as caught:
        tr.load(made_by(origin))
    assert not ran.exists()
    fresh = set(sys.modules) - before
    assert not {n for n in fresh if n.partition(".")[0] in ("ournets", "antigravity", "this")}
    assert f"trusted={origin!r}" in str(caught.value)
    assert "spark.tritium.trustModels" in str(caught.value)


def test_a_module_of_torch_needs_no_trust(made_by: Callable[[str], str]) -> None:
    model = tr.load(made_by("torch.nn.modules.linear:Identity"))
    assert (model.predict(X) == X).all()


@pytest.mark.parametrize(
    ("origin", "trusted"),
    [
        ("ournets.models:make", "ournets.models:make"),
        ("ournets.models:make", ["torch.nn", "ournets.models:make"]),
        ("ournets.models:make", "somewhere.else:x, ournets.models:make"),
        ("ournets.models:Net", "ournets.models:Net"),
        ("ournets.models:Net", "ournets.models"),
        ("ournets.models:typed", ("ournets",)),
        ("ournets.models:make", True),
        ("ournets.models:make", "true"),
    ],
)
def test_what_the_caller_named_is_loaded(
    origin: str, trusted: Any, made_by: Callable[[str], str], installed: Path
) -> None:
    model = tr.load(made_by(origin), trusted=trusted)
    assert (model.predict(X) == X).all()
    assert model.origin == origin


@pytest.mark.parametrize(
    ("origin", "trusted"),
    [
        ("ournets.models:wipe", "ournets"),  # a package is trusted for its modules, not for all its functions
        ("ournets.models:make", "ournets"),  # nor for those that don't say what they return
        ("ournets.models:Path.cwd", "ournets"),
        ("ournets.models:torch.nn.Identity", "ournets"),
        ("ournets:os.getcwd", "ournets"),
        ("ournets.models:Loud", "ournets.models:Net"),
        ("ournets.models:wipe", "ournets.models:make"),
        ("ournets.loud:x", "ournets.models"),
        ("os:getcwd", "ournets"),
        ("ournets.models:Net", False),
        ("ournets.models:Net", "false"),
        ("ournets.models:Net", ""),
        ("ournets.models:Net", ()),
    ],
)
def test_a_name_allows_no_more_than_it_says(
    origin: str, trusted: Any, made_by: Callable[[str], str], installed: Path, ran: Path
) -> None:
    with pytest.raises(UntrustedModel):
        tr.load(made_by(origin), trusted=trusted)
    assert not ran.exists()
    assert "ournets.loud" not in sys.modules


@pytest.mark.parametrize("trusted", [3, ["ournets", 3], ["ournets-models"], [""], "ournets models", "/path:x", None])
def test_what_is_no_name(trusted: Any, made_by: Callable[[str], str]) -> None:
    with pytest.raises(BadSetting, match=r"trusted="):
        tr.load(made_by("ournets.models:Net"), trusted=trusted)


@pytest.mark.parametrize("origin", ["", ":", "x", ".models:Net", "ournets..models:Net", "ournets.models:", 7, ["a:b"]])
def test_an_origin_that_is_none(origin: Any, made_by: Callable[[Any], str]) -> None:
    for trusted in (False, True):
        with pytest.raises(ModelError, match=r"manifest.json"):
            tr.load(made_by(origin), trusted=trusted)


@pytest.mark.processes
def test_what_this_process_has_saved_is_trusted_by_its_checksums(tmp_path: Path) -> None:
    """Wherever its files are copied to. Not what another process has saved, nor with any byte changed since."""
    model = tr.Model(nn.Sequential(nn.Linear(1, 1)), SIGNATURE, transform=lambda inputs: inputs)
    model.save(str(tmp_path / "model"))
    shutil.copytree(tmp_path / "model", tmp_path / "copied")
    for place in ("model", "copied"):
        assert isinstance(tr.load(str(tmp_path / place)).module, nn.Sequential)
    manifest = tmp_path / "copied" / "manifest.json"
    content = json.loads(manifest.read_text())
    changed = (tmp_path / "copied" / "module.pkl").read_bytes() + b"."
    (tmp_path / "copied" / "module.pkl").write_bytes(changed)
    with pytest.raises(ModelError, match=r"module.pkl of the model .* is damaged"):
        tr.load(str(tmp_path / "copied"))
    content["files"]["module.pkl"] = {"bytes": len(changed), "sha256": hashlib.sha256(changed).hexdigest()}
    manifest.write_text(json.dumps(content, indent=2))
    with pytest.raises(UntrustedModel):
        tr.load(str(tmp_path / "copied"))
    code = "import sys, tritium as tr\ntry: tr.load(sys.argv[1])\nexcept tr.errors.UntrustedModel: print('refused')"
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "model")], capture_output=True, text=True, check=True
    )
    assert done.stdout == "refused\n"


@pytest.mark.usefixtures("saved_elsewhere")
def test_names_do_not_open_code_by_value(tmp_path: Path) -> None:
    tr.Model(nn.Identity(), SIGNATURE).save(str(tmp_path / "model"))
    with pytest.raises(UntrustedModel, match=r"trusted=True"):
        tr.load(str(tmp_path / "model"), trusted=["torch.nn", "torch.nn.modules.linear:Identity"])


@pytest.mark.parametrize("kind", ["module", "package", "namespace"])
def test_what_lies_in_the_current_directory_is_not_imported(
    kind: str,
    made_by: Callable[[str], str],
    installed: Path,
    ran: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A folder that was downloaded holds a model, and beside it a module of the name that it gives."""
    folder = tmp_path / "download"
    folder.mkdir()
    if kind == "module":
        (folder / "ournets.py").write_text(RAN.format(ran=str(ran)))
    else:
        (folder / "ournets").mkdir()
        (folder / "ournets" / "models.py").write_text(RAN.format(ran=str(ran)))
        if kind == "package":
            (folder / "ournets" / "__init__.py").write_text(RAN.format(ran=str(ran)))
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend("")
    path = made_by("ournets.models:Net")
    for trusted in ("ournets.models:Net", "ournets"):
        with pytest.raises(UntrustedModel, match=r"current directory.*download.*import ournets"):
            tr.load(path, trusted=trusted)
    assert not ran.exists()
    assert "ournets" not in sys.modules


def test_what_the_program_has_imported_itself_is_used(
    made_by: Callable[[str], str], installed: Path, ran: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A script that imports the module beside it has run that code already."""
    monkeypatch.chdir(installed)
    path = made_by("ournets.models:Net")
    with pytest.raises(UntrustedModel, match=r"current directory"):
        tr.load(path, trusted="ournets")
    __import__("ournets")
    assert (tr.load(path, trusted="ournets").predict(X) == X).all()


def test_a_namespace_that_reaches_into_the_current_directory(
    made_by: Callable[[str], str], ran: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, installed: Path
) -> None:
    (installed / "strangers").mkdir()
    (installed / "strangers" / "good.py").write_text("number = 1\n")
    (tmp_path / "download" / "strangers").mkdir(parents=True)
    (tmp_path / "download" / "strangers" / "bad.py").write_text(RAN.format(ran=str(ran)))
    monkeypatch.chdir(tmp_path / "download")
    monkeypatch.syspath_prepend("")
    __import__("strangers.good")
    with pytest.raises(UntrustedModel, match=r"current directory"):
        tr.load(made_by("strangers.bad:Net"), trusted="strangers")
    assert not ran.exists()


def test_a_function_that_fails_or_wants_arguments(made_by: Callable[[str], str], installed: Path) -> None:
    with pytest.raises(
        ModelError, match=r"'torch.nn.modules.linear:Linear', which can't be called without arguments"
    ) as caught:
        tr.load(made_by("torch.nn.modules.linear:Linear"))
    assert isinstance(caught.value.__cause__, TypeError)
    with pytest.raises(ModelError, match=r"gave a NoneType"):
        tr.load(made_by("ournets.models:wipe"), trusted="ournets.models:wipe")
    with pytest.raises(ModelError, match=r"'ournets.models:gone', which can't be imported here"):
        tr.load(made_by("ournets.models:gone"), trusted="ournets.models:gone")


def test_a_plain_python_beside_a_downloaded_model(made_by: Callable[[str], str], ran: Path, tmp_path: Path) -> None:
    folder = tmp_path / "download"
    folder.mkdir()
    (folder / "evil.py").write_text(RAN.format(ran=str(ran)) + "import torch\nNet = torch.nn.Identity\n")
    code = (
        "import sys, tritium as tr\n"
        "for trusted in (False, 'evil', 'evil:Net'):\n"
        "    try: tr.load(sys.argv[1], trusted=trusted)\n"
        "    except tr.errors.UntrustedModel: print('refused')\n"
    )
    command = [sys.executable, "-c", code, made_by("evil:Net")]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.split() == ["refused"] * 3, done.stderr
    assert not ran.exists()

"""`env_packages`: the ranks have packages that neither the driver nor Spark's Python has."""

from __future__ import annotations

import importlib.util
import json
import os
import zipfile
from pathlib import Path
from typing import Any

import pytest

import tritium as tr
from tritium.errors import BadSetting
from tritium.gang.packages import Packages
from tritium.gang.supervisor import packages as installed
from tritium.host_cache import CacheEntry
from wheels import wheel

QUIET: dict[str, Any] = {"on": "driver", "progress": False, "output": "none"}


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "environments"
    monkeypatch.setenv(installed.ROOT, str(folder))
    return folder


def look() -> tuple[str, str]:
    import bicycles

    return bicycles.version, os.path.dirname(bicycles.__file__)


def notes(run_dir: Path) -> list[str]:
    return [note for note in json.loads((run_dir / "report.json").read_text())["notes"] if "env_packages" in note]


@pytest.mark.processes
@pytest.mark.parametrize("installer", ["uv", "pip"])
def test_the_ranks_alone_have_them_and_they_are_installed_once(
    installer: str, tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if installer == "pip":
        without_uv(monkeypatch)
    ours = wheel(tmp_path, "bicycles", "1.2")
    for run in ("first", "second"):
        lines = [f"bicycles @ {ours}"] if run == "first" else [str(ours)]
        found = tr.launch(look, ranks=2, env_packages=lines, run_dir=str(tmp_path / run), **QUIET)
        assert [version for version, _ in found] == ["1.2", "1.2"]
        assert {str(Path(place).parent) for _, place in found} == {str(root)}
    assert importlib.util.find_spec("bicycles") is None
    first, second = notes(tmp_path / "first"), notes(tmp_path / "second")
    assert first[0].startswith(f"installs env_packages with {installer} on ")
    assert first[1].endswith(" s: bicycles 1.2")
    assert (len(first), second) == (2, [])
    assert not list(root.glob("*.part"))


@pytest.mark.processes
def test_a_package_that_is_missing_is_an_error_in_the_installers_words(tmp_path: Path, root: Path) -> None:
    def train() -> None:
        (tmp_path / "trained").touch()

    with pytest.raises(BadSetting, match=r"can't be installed on .*: uv says\n(.|\n)*nosuchbicycles") as caught:
        tr.launch(train, ranks=2, env_packages=["--no-index", "nosuchbicycles==1.0"], **QUIET)
    assert caught.value.setting == "env_packages"
    assert not (tmp_path / "trained").exists()
    assert not [path for path in root.iterdir() if path.is_dir()]


def test_what_a_requirements_file_says_is_read_on_the_driver(tmp_path: Path) -> None:
    ours = wheel(tmp_path, "bicycles", "3.0")
    file = tmp_path / "requirements.txt"
    file.write_text(
        "# training\ntorch==2.13.0  # pinned\n\n--extra-index-url https://host/simple\n./" + ours.name + "\n"
    )
    read = Packages.read(str(file))
    assert read is not None
    assert read.requirements == f"torch==2.13.0\n--extra-index-url https://host/simple\n./{ours.name}\n"
    assert read.files == {ours.name: ours.read_bytes()}
    assert Packages.read(()) is None


def test_the_name_is_that_of_the_content(tmp_path: Path) -> None:
    path = wheel(tmp_path, "bicycles", "3.0")
    before = Packages.read([str(path)])
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("more.py", "")
    after, again = Packages.read([str(path)]), Packages.read([str(path)])
    assert before is not None
    assert after is not None
    assert again is not None
    assert before.name != after.name == again.name


@pytest.mark.parametrize(
    ("wanted", "says"),
    [
        (
            ["./missing-1.0-py3-none-any.whl"],
            "names the file ./missing-1.0-py3-none-any.whl, which can't be read: No such",
        ),
        (["-e ."], "'-e .' names something that is on this machine alone"),
        (["-r more.txt"], "'-r more.txt' names something that is on this machine alone"),
        ("no-requirements.txt", "must be the path of a requirements file, or a list of its lines"),
        (7, "must be the path of a requirements file, or a list of its lines"),
    ],
)
def test_what_can_not_be_shipped_is_refused_before_anything_starts(wanted: Any, says: str, tmp_path: Path) -> None:
    with pytest.raises(BadSetting, match=says.replace(".", r"\.").replace("(", r"\(")):
        tr.launch(look, ranks=1, env_packages=wanted, run_dir=str(tmp_path / "run"), **QUIET)
    assert not (tmp_path / "run").exists()


def test_in_this_process_there_are_none() -> None:
    with pytest.raises(BadSetting, match='on="here" has none'):
        tr.Gang(env_packages=["numpy"], on="here")


def test_old_ones_go_and_those_in_use_stay(tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installed, "_KEPT", 2)

    def install(version: str) -> CacheEntry:
        packages = Packages.read([str(wheel(tmp_path, "bicycles", version))])
        assert packages is not None
        environment = installed.install(packages, lambda text: None)
        os.utime(environment.path, (float(version), float(version)))
        return environment

    used = install("1")
    others = [install(version) for version in ("2", "3")]
    for environment in others:
        environment.close()
    newest = install("4")
    there = {path for path in root.iterdir() if path.is_dir()}
    assert there == {used.path, others[1].path, newest.path}
    for environment in (used, newest):
        environment.close()


def test_a_directory_that_others_may_write_is_refused(tmp_path: Path, root: Path) -> None:
    root.mkdir()
    root.chmod(0o777)
    packages = Packages.read([str(wheel(tmp_path, "bicycles", "1"))])
    assert packages is not None
    with pytest.raises(BadSetting, match="could be written by another user"):
        installed.install(packages, lambda text: None)


def without_uv(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name == "uv" else find(name, *more))
    monkeypatch.setattr("shutil.which", lambda name: None)

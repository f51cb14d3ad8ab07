"""The package and the user's code in a plain Python that has neither, but has what every executor has."""

from __future__ import annotations

import pickle
import subprocess
import sys
import textwrap
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import tritium as tr
from tritium import package, ship
from tritium.errors import BadSetting

# Spark's workers read a function with pyspark's own cloudpickle; here this takes its place.
CALL = """
import importlib.util, marshal, types
assert not importlib.util.find_spec("tritium") and not importlib.util.find_spec("cloudpickle")

def function(path):
    code, *cells = marshal.loads(open(path, "rb").read())
    scope = {"__name__": "__main__", "__builtins__": __builtins__}
    return types.FunctionType(marshal.loads(code), scope, "call", None, tuple(map(types.CellType, cells)))
"""


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """Return a runner for programs in a Python with NumPy and pyarrow but no Tritium, cloudpickle or this directory."""
    folder = tmp_path_factory.mktemp("bare")
    for entry in Path(pytest.__file__).parents[1].iterdir():
        if entry.name.lower().startswith(("numpy", "pyarrow")):
            folder.joinpath(entry.name).symlink_to(entry)

    def run(program: str, *arguments: bytes) -> str:
        paths = []
        for number, data in enumerate(arguments):
            paths.append(folder / str(number))
            paths[-1].write_bytes(data)
        boot = f"import sys; sys.path.insert(0, {str(folder)!r})\n" + CALL + textwrap.dedent(program)
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-c", boot, *map(str, paths)], capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


def flat(entry: Any) -> bytes:
    """Return an entry as its code and the plain values it closes over, which is all it needs."""
    import marshal

    assert not entry.__defaults__
    return marshal.dumps((marshal.dumps(entry.__code__), *(cell.cell_contents for cell in entry.__closure__)))


class TestEntry:
    def test_runs_where_tritium_is_not_installed(self, bare: Callable[..., str]) -> None:
        entry = ship.entry("tritium.wire:Message", b"a payload")
        program = """
            message = function(sys.argv[1])()
            import tritium
            print(type(message).__name__, message.kind, tritium.__file__.partition("/fd/")[0].rstrip("0123456789"))
            print(sys.modules["tritium"].__digest__)
        """
        out = bare(program, flat(entry)).split("\n")
        assert out[0] == "Message b'a payload' /proc/"
        assert out[1] == ship.digest(package.zipped())

    def test_what_a_supervisor_and_a_rank_import_is_there(self, bare: Callable[..., str]) -> None:
        entry = ship.entry("tritium.ship:digest", b"")
        program = """
            function(sys.argv[1])()
            import tritium.gang.supervisor.supervisor, tritium.gang.rank.main, tritium.gang.coordinator.on_executor
            import cloudpickle
            heavy = {"torch", "pandas", "pyspark", "rich", "click", "fsspec"} & set(sys.modules)
            print("imported", sorted(heavy), cloudpickle.__file__.startswith("/proc/"))
        """
        assert bare(program, flat(entry)) == "imported [] True\n"

    @pytest.mark.parametrize("end", ["", "os._exit(0)", "os.kill(os.getpid(), 9)"])
    def test_without_memory_files_no_file_is_left_behind(self, end: str, bare: Callable[..., str]) -> None:
        """As on macOS; Spark's workers end without exit handlers."""
        program = f"""
            import os
            del os.memfd_create
            child = os.fork()
            if child:
                os.waitpid(child, 0)
            else:
                function(sys.argv[1])()
                import tritium.gang.supervisor.supervisor
                print(sys._tritium[0], os.path.exists(sys._tritium[0]), flush=True)
                {end}
        """
        path, there = bare(program, flat(ship.entry("tritium.ship:digest", b""))).split()
        assert there == "True"
        assert "tritium-mount-" in path
        assert not Path(path).exists()

    def test_a_reused_worker_forgets_an_older_tritium(self, bare: Callable[..., str]) -> None:
        program = """
            import types
            old = sys.modules["tritium"] = types.ModuleType("tritium")
            sys.modules["tritium.errors"] = types.ModuleType("tritium.errors")
            old.__digest__ = "older"
            sys.path.insert(0, "/proc/1/fd/tritium-mount")
            sys._tritium = ("/proc/1/fd/tritium-mount",)
            print(type(function(sys.argv[1])()).__name__, [p for p in sys.path if "tritium-mount" in p])
            before = sys.modules["tritium"], list(sys.path)
            function(sys.argv[1])()
            print(before == (sys.modules["tritium"], list(sys.path)))
        """
        entry = ship.entry("tritium.wire:Message", b"x")
        assert bare(program, flat(entry)) == "Message []\nTrue\n"

    def test_passes_arguments_and_carries_annotations(self) -> None:
        entry = ship.entry("tritium.ship:digest", b"x", {"return": "int"})
        assert entry.__annotations__ == {"return": "int"}
        assert entry.__name__ == "digest"
        assert entry.__module__ == "__main__"  # so that pyspark, too, takes it by value


MODULE = """
import helper_module
class Box:
    def __init__(self, value):
        self.value = value
def make(value):
    return Box(helper_module.double(value))
"""


@pytest.fixture
def users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """Yield one of two modules of the user's, which imports the other."""
    (tmp_path / "helper_module.py").write_text("def double(x):\n    return 2 * x\n")
    (tmp_path / "user_module.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    import user_module  # type: ignore[import-not-found]

    yield user_module
    for name in ("user_module", "helper_module"):
        sys.modules.pop(name, None)


def driver(fn: Callable[..., Any], **settings: Any) -> list[Any]:
    return tr.launch(fn, on="driver", progress=False, output="none", **settings)


class TestTheUsersOwnModules:
    def test_travel_by_value(self, users: ModuleType, bare: Callable[..., str]) -> None:
        payload = ship.pickle((users.make, 4))
        program = """
            function(sys.argv[1])()
            import pickle
            make, value = pickle.loads(open(sys.argv[2], "rb").read())
            print(make(value).value, "user_module" in sys.modules)
        """
        assert bare(program, flat(ship.entry("tritium.ship:digest", b"")), payload) == "8 False\n"

    @pytest.mark.processes
    def test_objects_that_come_back_are_of_the_class_that_is_here(self, users: ModuleType) -> None:
        (box,) = driver(lambda: users.make(5))
        assert type(box) is users.Box
        assert box.value == 10

    @pytest.mark.processes
    def test_an_object_that_went_and_came_back_too(self, users: ModuleType) -> None:
        (box,) = driver(lambda box: box, args=(users.Box(1),))
        assert type(box) is users.Box

    @pytest.mark.processes
    def test_are_not_left_registered(self, users: ModuleType) -> None:
        import cloudpickle

        before = set(cloudpickle.list_registry_pickle_by_value())
        driver(users.make, args=(1,))
        assert set(cloudpickle.list_registry_pickle_by_value()) == before

    def test_installed_packages_stay_references(self) -> None:
        import click

        assert b"click" in ship.pickle(click.command)
        assert len(ship.pickle(click.command)) < 200
        assert pickle.loads(ship.pickle(click.command)) is click.command

    def test_a_link_among_installed_packages_is_installed(self, tmp_path: Path) -> None:
        (tmp_path / "cache").mkdir()
        (tmp_path / "cache" / "linked.py").touch()  # where an installer that links keeps its files
        (tmp_path / "site-packages").mkdir()
        link = tmp_path / "site-packages" / "linked.py"
        link.symlink_to(tmp_path / "cache" / "linked.py")
        assert ship.is_installed(str(link))
        assert not ship.is_installed(str(tmp_path / "cache" / "linked.py"))

    def test_packages_that_pip_installed_in_a_folder_of_their_own_are_installed(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        record = tmp_path / "given-1.0.dist-info" / "RECORD"
        record.parent.mkdir()
        record.write_text("../bin/given,sha256=x,1\nalone.py,sha256=x,1\ngiven/inner/deep.py,sha256=x,1\nRECORD,,\n")
        monkeypatch.syspath_prepend(str(tmp_path))
        names = ("alone.py", "given/inner/deep.py", "own.py")
        assert [ship.is_installed(str(tmp_path / name)) for name in names] == [True, True, False]


@pytest.mark.processes
class TestPyFiles:
    @pytest.fixture
    def files(self, tmp_path: Path) -> dict[str, Path]:
        (tmp_path / "shipped_module.py").write_text("VALUE = 'a file'\n")
        package = tmp_path / "shipped_package"
        (package / "inner").mkdir(parents=True)
        for folder in (package, package / "inner"):
            (folder / "__init__.py").write_text("")
        (package / "inner" / "deep.py").write_text("VALUE = 'a package'\n")
        with zipfile.ZipFile(tmp_path / "code.zip", "w") as archive:
            archive.writestr("shipped_zip.py", "VALUE = 'a zip'\n")
        return {"file": tmp_path / "shipped_module.py", "package": package, "zip": tmp_path / "code.zip"}

    def test_can_be_imported_by_the_ranks(self, files: dict[str, Path]) -> None:
        def train() -> list[str]:
            import shipped_module  # type: ignore[import-not-found]
            import shipped_package.inner.deep  # type: ignore[import-not-found]
            import shipped_zip  # type: ignore[import-not-found]

            return [shipped_module.VALUE, shipped_package.inner.deep.VALUE, shipped_zip.VALUE]

        assert (
            driver(train, ranks=2, py_files=[str(path) for path in files.values()])
            == [["a file", "a package", "a zip"]] * 2
        )
        assert not [name for name in sys.modules if name.startswith("shipped_")]

    def test_stay_references_when_the_function_is_theirs(
        self, files: dict[str, Path], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        files["file"].write_text("import sys\ndef where():\n    return sys.modules[__name__].__file__\n")
        monkeypatch.syspath_prepend(str(files["file"].parent))
        import shipped_module

        try:
            (where,) = driver(shipped_module.where, py_files=[str(files["file"])])
        finally:
            del sys.modules["shipped_module"]
        assert where.startswith("/proc/")

    def test_what_is_none_is_said(self, tmp_path: Path) -> None:
        (tmp_path / "notes.txt").write_text("")
        with pytest.raises(BadSetting, match=r"notes\.txt' is no Python file, package directory or zip"):
            driver(lambda: None, py_files=[str(tmp_path / "notes.txt")])

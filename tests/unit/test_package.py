"""The zip of this package, which travels to executors: what it contains, and that it is made once."""

from __future__ import annotations

import hashlib
import io
import lzma
import os
import subprocess
import sys
import textwrap
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tritium import package

SMALL = {"tritium/__init__.py": b"", "tritium/wire.py": b"def f(a: int):\n    'what it does'\n    return a\n"}


@pytest.fixture
def again() -> Iterator[Callable[[], None]]:
    """Yield a function after which the next call of `zipped` is as the first of a process."""
    yield package.zipped.cache_clear
    package.zipped.cache_clear()


def test_the_package_is_the_same_zip_every_time(again: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    first = package.zipped()  # kept by this process, or another one of the tests
    monkeypatch.setenv(package.CACHE, "")
    again()
    assert package.zipped() == first
    # From 1,024,000 bytes on, Spark warns at each launch that it broadcasts a large task. Its plan takes 22,000 of them
    # (4.2.1, two DataFrames), and the user's function must find room, too.
    assert len(first) < 930_000
    with zipfile.ZipFile(io.BytesIO(lzma.decompress(first))) as archive:
        names = archive.namelist()
    assert {"tritium/gang/rank/main.pyc", "tritium_compat/horovod/__init__.pyc", "cloudpickle/__init__.pyc"} <= {*names}
    assert not [name for name in names if "__pycache__" in name or name.startswith("tritium/cli/")]


def from_the_zip(folder: Path, program: str) -> subprocess.CompletedProcess[str]:
    """Run a program in a Python that has this package from the zip, `sys.argv[1]`, and the libraries of this one."""
    zipped = folder / "tritium.zip"
    zipped.write_bytes(lzma.decompress(package.zipped()))
    libraries = os.path.dirname(os.path.dirname(pytest.__file__))
    paths = "import sys\nsys.path.insert(0, sys.argv[1])\nsys.path.append(sys.argv[2])\n"
    command = [sys.executable, "-S", "-c", paths + textwrap.dedent(program), str(zipped), libraries]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_every_public_name_can_be_imported_from_the_zip(tmp_path: Path) -> None:
    """A module of the user's that ranks import may name at its top what only the driver calls."""
    program = """
        import tritium, tritium.ml
        assert tritium.__file__.startswith(sys.argv[1]), tritium.__file__
        for name in dir(tritium):
            getattr(tritium, name)
        for name in ("TorchEstimator", "LightGBMClassifier", "FunctionEstimator", "fit"):
            getattr(tritium.ml, name)
        try:
            tritium.explain(None, None)
        except tritium.errors.TritiumError as error:
            print(error)
    """
    done = from_the_zip(tmp_path, program)
    assert done.stdout == "tr.explain is for the driver: executors don't have it. Call it outside of what they run.\n"


ON_THE_DRIVER = ["tritium.integration.command", "tritium.ml.torch.fit"]
"""Modules of the zip that import what is not in it; what executors do imports neither."""


@pytest.mark.processes
def test_what_is_in_the_zip_needs_nothing_that_is_not(tmp_path: Path) -> None:
    program = """
        import importlib, zipfile
        with zipfile.ZipFile(sys.argv[1]) as archive:
            files = [name[:-4] for name in archive.namelist() if name.startswith("tritium/") and name.endswith(".pyc")]
        lacking = []
        for name in sorted(file.replace("/", ".").removesuffix(".__init__") for file in files):
            try:
                importlib.import_module(name)
            except ModuleNotFoundError as error:
                if (error.name or "").startswith("tritium"):
                    lacking.append(name)
        print(lacking)
    """
    done = from_the_zip(tmp_path, program)
    assert done.stdout.splitlines()[-1:] == [str(ON_THE_DRIVER)], done.stderr[-2000:]


class TestKept:
    """For later processes of the same user with the same sources."""

    @pytest.fixture
    def cache(self, tmp_path: Path, again: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
        """Return the directory, and the file in it that this process has kept."""
        monkeypatch.setenv(package.CACHE, str(tmp_path / "a" / "b"))
        monkeypatch.setattr(package, "_sources", lambda *_: SMALL.items())
        again()
        package.zipped()
        (file,) = tmp_path.glob("a/b/*")
        return file.parent, file

    @pytest.fixture
    def made(self, monkeypatch: pytest.MonkeyPatch) -> list[int]:
        """Return a list that grows with each zip that is made, of SMALL."""
        monkeypatch.setattr(package, "_sources", lambda *_: SMALL.items())
        made: list[int] = []
        compiled = package._compiled

        def counted(sources: dict[str, bytes]) -> bytes:
            made.append(len(sources))
            return compiled(sources)

        monkeypatch.setattr(package, "_compiled", counted)
        return made

    def test_another_process_finds_it(self, again: Callable[[], None]) -> None:
        again()
        right = package.zipped()
        program = """
            import hashlib
            from tritium import package
            def refused(sources): raise AssertionError("it is made again")
            package._compiled = refused
            print(hashlib.sha256(package.zipped()).hexdigest())
        """
        found = subprocess.check_output([sys.executable, "-c", textwrap.dedent(program)], text=True)
        assert found.strip() == hashlib.sha256(right).hexdigest()

    def test_by_this_user_alone(self, cache: tuple[Path, Path]) -> None:
        directory, file = cache
        assert (directory.stat().st_mode & 0o777, file.stat().st_mode & 0o777) == (0o700, 0o600)

    def test_other_sources_are_another_file(
        self, cache: tuple[Path, Path], made: list[int], monkeypatch: pytest.MonkeyPatch, again: Callable[[], None]
    ) -> None:
        for number, other in enumerate([{**SMALL, "tritium/more.py": b""}, {**SMALL, "tritium/wire.py": b"f = 1"}]):
            monkeypatch.setattr(package, "_sources", lambda *_, other=other: other.items())
            again()
            with zipfile.ZipFile(io.BytesIO(lzma.decompress(package.zipped()))) as archive:
                assert archive.namelist() == [f"{name}c" for name in other]
            assert (len(made), len(list(cache[0].iterdir()))) == (number + 1, number + 2)

    @pytest.mark.parametrize("what", ["cut", "changed", "empty", "writable by others"])
    def test_a_file_that_is_damaged_or_not_this_users_alone_is_not_used(
        self, what: str, cache: tuple[Path, Path], made: list[int], again: Callable[[], None]
    ) -> None:
        right, (_, file) = package.zipped(), cache
        content = file.read_bytes()
        if what == "writable by others":
            file.chmod(0o666)
        else:
            changed = content[:-1] + bytes([content[-1] ^ 1])
            file.write_bytes({"cut": content[:-100], "changed": changed, "empty": b""}[what])
        again()
        assert package.zipped() == right
        assert len(made) == 1
        assert (file.read_bytes(), file.stat().st_mode & 0o777) == (content, 0o600)

    def test_where_nothing_can_be_kept_it_is_made(
        self, made: list[int], again: Callable[[], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        (tmp_path / "file").write_text("")
        for place in (str(tmp_path / "file"), ""):
            monkeypatch.setenv(package.CACHE, place)
            again()
            assert lzma.decompress(package.zipped())
        assert len(made) == 2
        assert [path.name for path in tmp_path.iterdir()] == ["file"]

    def test_the_users_directory_for_caches_is_the_default(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, again: Callable[[], None]
    ) -> None:
        monkeypatch.delenv(package.CACHE)
        monkeypatch.setenv("HOME", str(tmp_path))
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
        monkeypatch.setattr(package, "_sources", lambda *_: SMALL.items())
        again()
        package.zipped()
        assert [path.suffix for path in (tmp_path / ".cache" / "tritium").iterdir()] == [".xz"]

    def test_the_oldest_are_removed(self, cache: tuple[Path, Path]) -> None:
        directory, file = cache
        os.utime(file, (1, 1))
        for number in range(package._KEPT):
            package._keep(f"{number}", b"x")
        assert {path.stem for path in directory.iterdir()} == {f"{number}" for number in range(package._KEPT)}

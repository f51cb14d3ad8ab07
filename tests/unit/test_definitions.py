"""The user's functions and classes in a rank: in modules of the driver's names, as in any Python program."""

from __future__ import annotations

import functools
import pickle
import subprocess
import sys
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import tritium as tr
from tritium import ship
from tritium.errors import RankFailed
from tritium.gang.program import Program

QUIET = {"on": "driver", "ranks": 1, "progress": False, "output": "none"}

# A script; as a notebook, it has no file.
SCRIPT = """
import dataclasses, enum, functools, json, multiprocessing, pickle, sys, typing
import tritium as tr

@dataclasses.dataclass
class Config:
    rate: "Rate" = 0.5

Rate = typing.NewType("Rate", float)

class Net:
    scale = 1
    class Head:
        pass
    @functools.lru_cache
    def width(self):
        return 8
    def __call__(self, x):
        return FACTOR * x

class Color(enum.Enum):
    RED = 1

class Refused(Exception):
    pass

@functools.cache
def fibonacci(n: Rate) -> Rate:
    return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)

def square(x):
    return Config(FACTOR * x * x)

FACTOR = 1
COUNT = 0

def same(thing):
    back = pickle.loads(pickle.dumps(thing))
    return back is thing or type(back) is type(thing)

def checks(net, how):
    global COUNT
    COUNT += 1
    here = sys.modules["__main__"]
    assert here.COUNT == COUNT == 1 and here.checks is checks and __name__ == "__main__"
    assert all(map(same, (net, Config(), Net, Net.Head(), Color.RED, square, checks)))
    assert typing.get_type_hints(Config) == {"rate": Rate}
    assert fibonacci(20) == 6765 and pickle.loads(pickle.dumps(fibonacci)) is fibonacci and net.width() == 8
    for each in how:
        with multiprocessing.get_context(each).Pool(1) as pool:
            found = pool.map(square, [3])
            assert found == [Config(9)], found
            assert pool.apply(same, (net,))
    Net.scale = 2
    return net, Config(2), lambda x: square(x), Net.Head, COUNT, tr.world().gather(Config(tr.world().rank))

def refuse():
    raise Refused("no")

if __name__ == "__main__":
    quiet = {"on": "driver", "progress": False, "output": "none"}
    for net, config, call, head, count, configs in tr.launch(checks, ranks=2, args=(Net(), HOW), **quiet):
        assert type(net) is Net and config == Config(2) and head is Net.Head and configs == [Config(0), Config(1)]
        assert count == 1 and COUNT == 0 and Net.scale == 1
        FACTOR = 7
        assert (net(1), Net()(1)) == (7, 7) and call(2) == Config(28)
        FACTOR = 1
    class Net:  # the cell is run again
        def __call__(self, x):
            return -x
    class Refused(ValueError):
        pass
    [net] = tr.launch(lambda net: pickle.loads(pickle.dumps(net)), ranks=1, args=(Net(),), **quiet)
    assert type(net) is Net and net(1) == -1
    try:
        tr.launch(refuse, ranks=1, **quiet)
    except tr.errors.RankFailed as error:
        assert type(error.__cause__) is Refused
        print("refused")
"""


@pytest.mark.processes
@pytest.mark.parametrize("main", ["script", "notebook"])
def test_main_is_the_drivers(main: str, tmp_path: Path) -> None:
    how = ["fork", "spawn", "forkserver"] if main == "script" else ["spawn"]
    source = SCRIPT.replace("HOW", repr(how))
    script = tmp_path / "train.py"
    script.write_text(source)
    command = [sys.executable, *([str(script)] if main == "script" else ["-c", source])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
    assert (done.stdout, done.returncode) == ("refused\n", 0), done.stderr


PROGRAM = """
import sys

early = sys.modules["__mp_main__"]  # as where the framework has imported multiprocessing before the script
import dataclasses, multiprocessing

@dataclasses.dataclass
class Config:
    rate: int

def square(config):
    return Config(config.rate * config.rate), __name__, __file__

if __name__ == "__main__":
    for how in ("spawn", "forkserver"):
        with multiprocessing.get_context(how).Pool(1) as pool:
            sys.modules["__mp_main__"] = early
            found = pool.map(square, [Config(3)])
        assert found == [(Config(9), "__mp_main__", __file__)], found
"""


@pytest.mark.processes
@pytest.mark.parametrize("there", [True, False])
def test_processes_that_a_script_spawns_find_it(there: bool, tmp_path: Path) -> None:
    place = tmp_path / "program.py"
    if there:
        place.write_text(PROGRAM)
    assert tr.launch(Program("script", str(place), (), PROGRAM.encode()), **QUIET) == [None]


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Yield a directory of the user's modules, which only this process has on its path."""
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(vars(sys.modules[name]).get("__file__")) or name == "a_folder":
            del sys.modules[name]


def write(project: Path, **sources: str) -> None:
    for name, source in sources.items():
        path = project.joinpath(*name.split("__")).with_suffix(".py")
        path.parent.mkdir(exist_ok=True)
        path.write_text(source)


def on_driver(fn: Callable[..., Any], *args: Any, here: bool = False, **settings: Any) -> Any:
    """Return the rank's result. `here`: the rank has the modules on its path, too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", sys.path if here else sys.path[1:])
        return tr.launch(fn, args=args, **{**QUIET, **settings})[0]


@pytest.mark.processes
class TestModules:
    def test_are_one_with_their_functions_and_can_be_imported(self, project: Path) -> None:
        write(
            project,
            own_rates="import own_nets\nRATE = 1\nclass Rate: pass\ndef rate():\n    return RATE\n"
            "def set_rate(rate):\n    global RATE\n    RATE = rate\ndef nets():\n    return own_nets.nets()\n",
            own_nets="import own_rates\nclass Net: pass\ndef nets():\n    return own_rates.rate()\n",
        )
        import own_nets  # type: ignore[import-not-found]
        import own_rates  # type: ignore[import-not-found]

        def train(net: Any) -> Any:
            import own_nets as again

            own_rates.set_rate(5)
            assert (own_rates.rate(), own_rates.RATE, own_nets.nets(), own_rates.nets()) == (5,) * 4
            own_rates.RATE = 6
            assert own_rates.rate() == own_nets.nets() == 6
            back = pickle.loads(pickle.dumps([net, own_rates.Rate()]))
            assert type(back[0]) is again.Net
            assert again is sys.modules["own_nets"]
            return back, own_rates

        (net, rate), module = on_driver(train, own_nets.Net())
        assert type(net) is own_nets.Net
        assert type(rate) is own_rates.Rate
        assert module is own_rates
        assert own_rates.RATE == 1

    def test_in_packages_and_folders(self, project: Path) -> None:
        write(
            project,
            a_package____init__="from . import inner\n",
            a_package__inner="class Net: pass\ndef make():\n    from . import inner\n    return inner.Net()\n",
            a_folder__inner="class Net: pass\ndef make():\n    return Net()\n",
        )
        import a_folder.inner  # type: ignore[import-not-found]
        import a_package.inner  # type: ignore[import-not-found]

        def train(*functions: Any) -> Any:
            return [pickle.loads(pickle.dumps(function())) for function in functions]

        one, other = on_driver(train, a_package.inner.make, a_folder.inner.make)
        assert type(one) is a_package.inner.Net
        assert type(other) is a_folder.inner.Net

    def test_what_did_not_travel_is_from_the_file_where_there_is_one(self, project: Path) -> None:
        write(project, own_parts="class Net: pass\nclass Other: pass\nprint('imported')\n")
        import own_parts  # type: ignore[import-not-found]

        def train(kind: type) -> Any:
            import own_parts as again

            assert again.Net is kind
            assert not hasattr(again, "nothing")
            from own_parts import Other

            return Other.__name__

        assert on_driver(train, own_parts.Net, here=True) == "Other"
        with pytest.raises(RankFailed, match=r"Only what that function uses of 'own_parts' has come from the driver"):
            on_driver(train, own_parts.Net)
        assert on_driver(train, own_parts.Net, py_files=[str(project / "own_parts.py")]) == "Other"

    @pytest.mark.parametrize("py_files", [True, False])
    def test_an_object_of_a_class_that_the_rank_imported(self, py_files: bool, project: Path) -> None:
        write(project, own_results="import dataclasses\n@dataclasses.dataclass\nclass Result:\n    loss: float\n")
        import own_results  # type: ignore[import-not-found]

        def train() -> Any:
            from own_results import Result

            return Result(0.5)

        files = [str(project / "own_results.py")] if py_files else []
        assert on_driver(train, here=not py_files, py_files=files) == own_results.Result(0.5)

    def test_a_model_is_still_saved_by_value(self, project: Path) -> None:
        write(project, own_scores="def predict(batch):\n    return batch\n")
        import own_scores  # type: ignore[import-not-found]

        def train(predict: Any) -> Any:
            from tritium.model.trust import importable

            return importable(predict), ship.pickle(predict), sys.modules["own_scores"].predict is predict

        path, code, found = on_driver(train, own_scores.predict)
        assert (path, found) == (None, True)
        assert pickle.loads(code) is not own_scores.predict


@functools.lru_cache(maxsize=3, typed=True)
def cached(n: int) -> int:
    return n if n < 2 else cached(n - 1) + cached(n - 2)


UserId = typing.NewType("UserId", int)
P = typing.ParamSpec("P")
TYPES = [UserId, P, *([typing.TypeVarTuple("Ts")] if sys.version_info >= (3, 11) else [])]


def typed(user: UserId) -> UserId:
    return UserId(user + 1)


def test_what_python_pickles_by_name_goes_by_value() -> None:
    again: Any
    again, function, types = pickle.loads(ship.pickle((cached, typed, TYPES)))
    assert again is not cached
    assert again.cache_parameters() == {"maxsize": 3, "typed": True}
    assert (again(20), again.__wrapped__.__name__, again.cache_info().currsize) == (6765, "cached", 3)
    assert function(UserId(3)) == 4
    for mine, its in zip(TYPES, types, strict=True):
        assert its is not mine
        assert (type(its), its.__name__, its.__module__) == (type(mine), mine.__name__, __name__)
    assert types[0].__supertype__ is int
    assert pickle.loads(ship.pickle(functools.cache)) is functools.cache


def test_no_files_for_spawned_processes_where_the_globals_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    _, defined = ship.pickle_for_ranks(typed)
    assert typed in defined
    assert set(ship.files_of_spawned(defined)) == {"tritium_spawned.py", "tritium_spawned.pkl"}
    monkeypatch.setattr(ship, "LARGEST_DEFINITIONS", 10)
    assert ship.files_of_spawned(defined) == {}

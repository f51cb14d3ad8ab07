"""What of a setting's code counts in a training that continues: what it takes from modules, classes and objects."""

from __future__ import annotations

import importlib
import linecache
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tritium.checkpoint.code import Code, code_of

REFUSED = {
    "a number of a module": ("import helpers\ndef loss(x): return helpers.RATE * x", "RATE = 1", "RATE = 2"),
    "a function of a module": (
        "import helpers\ndef loss(x): return helpers.scale(x)",
        "def scale(x): return x",
        "def scale(x): return -x",
    ),
    "a module that a function imports around it": (
        "def make():\n    import helpers\n    def loss(x): return helpers.RATE * x\n    return loss\nloss = make()",
        "RATE = 1",
        "RATE = 2",
    ),
    "arguments of a script": (
        "from helpers import args\ndef loss(x): return args.rate * x",
        "import argparse\nargs = argparse.Namespace(rate=1)",
        "import argparse\nargs = argparse.Namespace(rate=2)",
    ),
    "a dataclass with slots": (
        "import dataclasses, helpers\n@dataclasses.dataclass(frozen=True, slots=True)\nclass Config:\n    rate: float\n"
        "config = Config(helpers.RATE)\ndef loss(x): return config.rate * x",
        "RATE = 1",
        "RATE = 2",
    ),
    "a list of a class": (
        "import helpers\nclass Loss:\n    weights = list(helpers.W)\n    def __call__(self, x): return x\n"
        "loss = Loss()",
        "W = 1, 2",
        "W = 1, 3",
    ),
    "a class of a class": (
        "from helpers import Loss\nloss = Loss()",
        "class Loss:\n    class Config:\n        rate = 1\n    def __call__(self, x): return x",
        "class Loss:\n    class Config:\n        rate = 2\n    def __call__(self, x): return x",
    ),
    "a cached method": (
        "from helpers import Loss\nloss = Loss()",
        "import functools\nclass Loss:\n    @functools.cache\n    def rate(self): return 1",
        "import functools\nclass Loss:\n    @functools.cache\n    def rate(self): return 2",
    ),
    "a cached property": (
        "from helpers import Loss\nloss = Loss()",
        "import functools\nclass Loss:\n    @functools.cached_property\n    def rate(self): return 1",
        "import functools\nclass Loss:\n    @functools.cached_property\n    def rate(self): return 2",
    ),
    "the value of an enum's member": (
        "from helpers import Rate\nrate = Rate.FAST\ndef loss(x): return rate.value * x",
        "import enum\nclass Rate(enum.Enum):\n    FAST = 1",
        "import enum\nclass Rate(enum.Enum):\n    FAST = 2",
    ),
    "which of two functions comes again": (
        "from helpers import order\ndef a(x): return x\ndef b(x): return -x\nloss = [[a, b][i] for i in order]",
        "order = 0, 1, 0",
        "order = 0, 1, 1",
    ),
    "a range": ("from helpers import r\ndef loss(x): return r", "r = range(3)", "r = range(4)"),
    "a getter": ("from helpers import loss", *(f"import operator\nloss = operator.itemgetter({i})" for i in (0, 1))),
    "a decimal": (
        "from helpers import d\ndef loss(x): return d",
        *(f"import decimal\nd = decimal.Decimal({i})" for i in (0, 1)),
    ),
    "a function of C": ("from helpers import f\ndef loss(x): return f(x)", "f = sum", "f = max"),
    "a series": (
        "from helpers import s\ndef loss(x): return s",
        *(f"import pandas\ns = pandas.Series([{i}])" for i in "12"),
    ),
    "an array of objects": (
        "from helpers import a\ndef loss(x): return a",
        *(f"import numpy\na = numpy.array([{i}, None])" for i in "12"),
    ),
    "what a package's function made of": (
        "from helpers import loss",
        *(f"from torch.optim.swa_utils import get_ema_avg_fn\nloss = get_ema_avg_fn({i})" for i in (0.9, 0.99)),
    ),
    "a tuple of code without source": (
        "from helpers import pair\nspace = {}\nexec(f'def loss(x): return {pair}', space)\nloss = space['loss']",
        "pair = (0.9, 0.99)",
        "pair = (0.9, 0.999)",
    ),
}
NOTED = {
    "a module that the function imports": (
        "def loss(x):\n    import helpers\n    return helpers.scale(x)\nloss(1)",
        "def scale(x): return x",
        "def scale(x): return -x",
    ),
    "what a package's object holds": (
        "import numpy\nfrom helpers import f\nloss = numpy.vectorize(f)",
        "def f(x): return x",
        "def f(x): return -x",
    ),
    "slots of an object": (
        "import helpers\nclass Loss:\n    __slots__ = ('rate',)\nloss = Loss()\nloss.rate = helpers.RATE",
        "RATE = 1",
        "RATE = 2",
    ),
    "what comes after many values": (
        "import helpers\nmany, rates = [0.5] * 30_000, [helpers.RATE]\ndef loss(x): return many, rates",
        "RATE = 1",
        "RATE = 2",
    ),
}
SAME = {
    "what is not used of a module": (
        "import helpers\ndef loss(x): return helpers.scale(x)",
        "def scale(x): return x",
        "def other(x): return 2\n\n# A comment.\ndef scale(x): return x",
    ),
    "a logger's level": (
        "from helpers import log\ndef loss(x):\n    log.info(x)\n    return x",
        "import logging\nlog = logging.getLogger('a')\nlog.setLevel(10)",
        "import logging\nlog = logging.getLogger('a')\nlog.setLevel(20)",
    ),
    "a lock": (
        "from helpers import lock\ndef loss(x): return lock",
        *["import threading\nlock = threading.Lock()"] * 2,
    ),
}


@pytest.fixture(autouse=True)
def own_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield
    forget()


def forget() -> None:
    for name in ("settings_of_mine", "helpers", "settings_moved", "moved"):
        sys.modules.pop(name, None)
    importlib.invalidate_caches()
    linecache.clearcache()


def code_in_a_session(folder: Path, source: str, helpers: str) -> Code:
    forget()
    (folder / "settings_of_mine.py").write_text(source + "\n")
    (folder / "helpers.py").write_text(helpers + "\n")
    return code_of(importlib.import_module("settings_of_mine").loss)


@pytest.mark.parametrize("change", REFUSED)
def test_what_makes_code_another(change: str, tmp_path: Path) -> None:
    source, before, now = REFUSED[change]
    one = code_in_a_session(tmp_path, source, before)
    assert code_in_a_session(tmp_path, source, before) == one, "the same in another session"
    assert code_in_a_session(tmp_path, source, now).exact != one.exact


@pytest.mark.parametrize("change", NOTED)
def test_what_can_not_be_known_is_told(change: str, tmp_path: Path) -> None:
    source, before, now = NOTED[change]
    one, again, other = (code_in_a_session(tmp_path, source, helpers) for helpers in (before, before, now))
    assert again == one
    assert other.exact == one.exact
    assert other.loose != one.loose or not other.known


@pytest.mark.parametrize("change", SAME)
def test_what_does_not_count(change: str, tmp_path: Path) -> None:
    source, before, now = SAME[change]
    assert code_in_a_session(tmp_path, source, before) == code_in_a_session(tmp_path, source, now)


def test_files_may_have_other_names(tmp_path: Path) -> None:
    source = (
        "import collections, enum\n"
        "import {module} as m\n"
        "Kind = enum.Enum('Kind', 'a b')\n"
        "Sizes = collections.namedtuple('Sizes', 'width')\n"
        "sizes, kind = Sizes(3), Kind.a\n"
        "class Loss:\n"
        "    def __call__(self, x): return m.RATE * x, sizes, kind\n"
        "loss = Loss()\n"
    )
    one = code_in_a_session(tmp_path, source.format(module="helpers"), "RATE = 1")
    (tmp_path / "moved.py").write_text("RATE = 1\n")
    (tmp_path / "settings_moved.py").write_text("# It was elsewhere.\n" + source.format(module="moved"))
    assert code_of(importlib.import_module("settings_moved").loss) == one
    space = {"__name__": "__main__"}
    exec(compile(source.format(module="moved"), str(tmp_path / "settings_of_mine.py"), "exec"), space)
    linecache.clearcache()
    assert code_of(space["loss"]) == one, "run as a program"

"""Facts of errors are attributes that their classes declare."""

from __future__ import annotations

import ast
import inspect
import pickle
from pathlib import Path

import pytest

import tritium
from tritium import errors
from tritium.errors import BadRow, RankFailed, TritiumError

ROOT = Path(tritium.__file__).resolve().parents[2]
CLASSES = {name: cls for name, cls in vars(errors).items() if isinstance(cls, type) and issubclass(cls, TritiumError)}


def declared(cls: type) -> set[str]:
    return {name for base in cls.__mro__ for name in inspect.get_annotations(base)}


def test_what_is_raised_has_the_facts_that_its_class_declares() -> None:
    wrong = []
    for path in (*ROOT.glob("src/**/*.py"), *ROOT.glob("packages/*/src/**/*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            name = getattr(node.func, "id", getattr(node.func, "attr", "")) if isinstance(node, ast.Call) else ""
            if name in CLASSES:
                facts = {keyword.arg for keyword in node.keywords if keyword.arg is not None}  # type: ignore[attr-defined]
                wrong += [f"{path}:{node.lineno} {name}: {fact}" for fact in facts - declared(CLASSES[name])]
    assert not wrong


@pytest.mark.parametrize("name", CLASSES)
def test_every_fact_has_a_value_for_not_known(name: str) -> None:
    error = CLASSES[name]("no")
    for fact in declared(CLASSES[name]):
        getattr(error, fact)
    with pytest.raises(AttributeError):
        error.no_such_fact  # type: ignore[attr-defined]  # noqa: B018


def test_facts_survive_pickling() -> None:
    error = pickle.loads(pickle.dumps(BadRow("a null", column="x", row_id=3, rank=1)))
    assert (error.column, error.row_id, error.rank, error.value) == ("x", 3, 1, None)
    assert RankFailed("gone").signal is None

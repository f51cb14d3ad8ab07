"""Private interfaces of Spark, Py4J and PySpark are used in one place, each with a probe and a switch."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path

import pytest

import tritium
import tritium_compat
import tritium_flyte
from tritium.errors import BadSetting
from tritium.spark import inside
from tritium.spark.inside import SETTING, USES, Inside, end_of_stream, turned_off

PACKAGE = Path(tritium.__file__).parent
COMPAT = Path(tritium_compat.__file__).parent
FLYTE = Path(tritium_flyte.__file__).parent
ROOM = PACKAGE / "spark"
# Attributes of PySpark's and Py4J's objects that lead into the JVM, and others that are no public interface of theirs.
PRIVATE = re.compile(
    r"_(jvm|jdf|jsc|jc|jsparkSession|jconf|jschema|jrdd|gateway|gateway_client|sc|java_\w+|explain_string)"
)
TOOLS = {"catalyst", "unsafe"}  # Of jvm_bytes and as_rows, whose probes try them.
PUBLIC = {"older"}


def private(path: Path) -> list[str]:
    """Return the places in a file where such an attribute is read, by name or by `getattr` and `hasattr`."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        name = node.attr if isinstance(node, ast.Attribute) else None
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("getattr", "hasattr", "setattr"):
            name = next((a.value for a in node.args[1:2] if isinstance(a, ast.Constant)), None)
        if isinstance(name, str) and PRIVATE.fullmatch(name):
            found.append(f"{path}:{node.lineno}: {name}")
    return found


def test_only_this_room_touches_them() -> None:
    files = [path for folder in (PACKAGE, COMPAT, FLYTE) for path in folder.rglob("*.py") if ROOM not in path.parents]
    assert not [place for path in files for place in private(path)]


def test_within_the_room_the_session_has_the_jvm_and_inside_the_rest() -> None:
    found = {path for path in ROOM.rglob("*.py") if private(path)}
    assert {path for path in found if path.parent != ROOM / "inside"} == {ROOM / "session.py"}


def test_each_use_has_a_probe_and_a_switch() -> None:
    names = {path.stem for path in (ROOM / "inside").glob("*.py")} - {"__init__"} - TOOLS - PUBLIC
    assert names == set(USES)
    for name in names:
        module = importlib.import_module(f"tritium.spark.inside.{name}")
        assert callable(module.probe)
        assert isinstance(module.used, Inside)
        assert module.used.name == name


def test_the_pinned_spark_is_one_whose_end_of_rows_was_tried() -> None:
    pins = (Path(__file__).parents[4] / "constraints.txt").read_text()
    (version,) = re.findall(r"^pyspark==(.+)$", pins, re.MULTILINE)
    assert version.startswith(end_of_stream.TRIED)


def test_the_page_lists_all() -> None:
    page = (Path(__file__).parents[4] / "docs" / "launch.md").read_text()
    assert not [name for name in USES if f"| `{name}`" not in page]


def test_a_switch_that_does_not_exist_is_refused_with_those_that_do() -> None:
    assert turned_off("") == set()
    assert turned_off("-hadoop, -plans") == {"hadoop", "plans"}
    with pytest.raises(BadSetting, match=rf"{SETTING}='-hadop'.*There is no '-hadop'\. Did you mean '-hadoop'"):
        turned_off("-hadop")
    with pytest.raises(BadSetting, match="no 'plans'"):
        turned_off("plans")


class Session:
    """A session as a switch asks it."""

    def __init__(self, setting: str = "") -> None:
        self.conf = {SETTING: setting}
        self.sparkContext = self
        self.applicationId = str(id(self))


def test_a_probe_runs_once_an_application_and_its_error_is_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inside, "_probed", {})
    calls = []

    def probe(spark: object) -> str | None:
        calls.append(spark)
        raise RuntimeError("no such method\nat …")

    use, session = Inside("plans", probe), Session()
    assert [use.why_not(session), use.why_not(session)] == ["RuntimeError: no such method"] * 2
    assert calls == [session]
    assert not use(session)
    assert Inside("plans", lambda _: None).why_not(Session("-plans")) == f"{SETTING}=-plans"

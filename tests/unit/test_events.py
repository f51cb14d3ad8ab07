"""Events and their JSON form."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from typing import Any

import pytest

from tritium import events
from tritium.errors import WrongVersion
from tritium.events import Event, GangFailed, GangFormed, Logged, Note, RunOpened, read, stamped

VALUES: dict[str, Any] = {
    "str": "größer",
    "int": 3,
    "float": 0.5,
    "bool": True,
    "tuple[str, ...]": ("a", "b"),
    "Sequence[Mapping[str, Any]]": ({"rank": 0, "host": "b7"},),
    "Mapping[str, Sequence[int]]": {"train": [1, 2]},
    "Mapping[str, float]": {"forward": 0.25},
    "Mapping[str, float | str]": {"loss": 0.5},
    "Mapping[str, Mapping[str, Any]]": {"w": {"low": 0.0, "high": 1.0, "counts": [1, 2]}},
    "Mapping[str, str]": {"python": "3.11"},
    "Mapping[str, Any]": {"train": [[0, 3, "ff"]]},
}
KINDS = {cls.kind: cls for cls in vars(events).values() if isinstance(cls, type) and "kind" in vars(cls)}


@pytest.mark.parametrize("optional", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_read_is_what_was_written(kind: str, optional: bool) -> None:
    facts = {
        field.name: VALUES[str(field.type).removesuffix(" | None")]
        for field in fields(KINDS[kind])
        if field.name not in ("time", "run", "schema") and (optional or field.default is not None)
    }
    event = stamped(KINDS[kind](**facts), "run-1")
    assert event.run == "run-1"
    assert read(event.to_json()) == event


def test_there_is_a_class_for_every_kind() -> None:
    assert len(KINDS) >= 24
    assert all(issubclass(cls, Event) for cls in KINDS.values())


def test_numbers_that_json_does_not_have_and_secrets() -> None:
    line = Logged(rank=0, values={"loss": float("nan")}).to_json()
    assert json.loads(line)["values"] == {"loss": "NaN"}
    assert read(line) == Logged(rank=0, values={"loss": "NaN"})
    assert "secret" not in Note(text="s3://key:secret@bucket").to_json()


def test_a_time_once_given_stays() -> None:
    event = stamped(Note(text="x"), "a")
    assert stamped(event, "b") == event
    assert event.time.endswith("+00:00")


OLD = (
    '{"time": "2026-11-20T10:00:00.000+00:00", "kind": "run", "settings": {"ranks": 2}, "versions": {}}',
    '{"time": "2026-11-20T10:00:01.000+00:00", "kind": "formed", "peers": [{"rank": 0, "host": "b7"}]}',
    '{"time": "2026-11-20T10:00:02.000+00:00", "kind": "counts", "rank": 0, "name": "a", "shard": "a", "used": 5}',
    '{"time": "2026-11-20T10:00:03.000+00:00", "kind": "failed", "how": "signal", "rank": 0, "signal": "SIGKILL"}',
)


def test_lines_of_an_earlier_version_are_read() -> None:
    opened, formed, counts, failed = map(read, OLD)
    assert isinstance(opened, RunOpened)
    assert (opened.schema, opened.run) == (0, "")
    assert isinstance(formed, GangFormed)
    assert isinstance(failed, GangFailed)
    assert (counts.fields()["used"], failed.signal) == (5, "SIGKILL")


def test_those_of_a_later_one_are_refused_by_name() -> None:
    opened = RunOpened(settings={}, versions={})
    with pytest.raises(WrongVersion, match=f"These events have the schema {events.SCHEMA + 1}"):
        read(replace(opened, schema=events.SCHEMA + 1).to_json())
    with pytest.raises(WrongVersion, match="There is no event 'teleported'"):
        read('{"kind": "teleported"}')

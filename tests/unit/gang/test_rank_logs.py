"""Python's `logging` on ranks: the driver's levels and format, the rank in each record, JSON by setting."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tritium as tr
from tritium.errors import BadSetting


@pytest.fixture
def configured() -> Iterator[None]:
    """Configure this process's `logging` as a driver's, and undo it."""
    root, level = logging.root, logging.root.level
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(levelname)s of %(name)s: %(message)s"))
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    logging.getLogger("noisy").setLevel(logging.ERROR)
    yield
    root.removeHandler(handler)
    root.setLevel(level)
    logging.getLogger("noisy").setLevel(logging.NOTSET)


def speak(own: str = "") -> dict[str, Any]:
    import logging

    records: list[Any] = []
    if own:
        logging.basicConfig(format=own)
    logging.getLogger("mine").info("loss %d", 7, extra={"step": 3})
    logging.getLogger("mine").debug("unseen")
    logging.getLogger("noisy").warning("unseen")
    try:
        raise KeyError("gone")
    except KeyError:
        logging.getLogger("mine").exception("it went wrong")

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append(record)

    logger = logging.getLogger("mine")
    logger.addHandler(keep := Keep())
    logger.error("seen")
    logger.removeHandler(keep)
    return {"rank": records[0].rank, "run": records[0].run, "level": logging.root.level}


def spoken(tmp_path: Path, *args: Any, **settings: Any) -> tuple[list[dict[str, Any]], list[str]]:
    settings |= {"progress": False, "output": "none", "run_dir": str(tmp_path)}
    facts = tr.launch(speak, args=args, ranks=2, on="driver", **settings)
    return facts, (tmp_path / "logs" / "rank-1.log").read_text().splitlines()


@pytest.mark.processes
@pytest.mark.usefixtures("configured")
def test_ranks_have_the_levels_and_the_format_of_the_driver(tmp_path: Path) -> None:
    facts, lines = spoken(tmp_path)
    assert [of_rank["rank"] for of_rank in facts] == [0, 1]
    assert facts[0]["run"] == facts[1]["run"] == json.loads((tmp_path / "run.json").read_text())["run"]
    assert facts[0]["level"] == logging.INFO
    assert lines[:3] == ["INFO of mine: loss 7", "ERROR of mine: it went wrong", "Traceback (most recent call last):"]
    assert "unseen" not in "".join(lines)


@pytest.mark.processes
@pytest.mark.usefixtures("configured")
def test_json_lines_have_the_rank(tmp_path: Path) -> None:
    facts, lines = spoken(tmp_path, logs="json")
    first, second = (json.loads(line) for line in lines[:2])
    assert {name: first[name] for name in ("level", "logger", "rank", "run", "message", "step")} == {
        "level": "INFO", "logger": "mine", "rank": 1, "run": facts[0]["run"], "message": "loss 7", "step": 3,
    }  # fmt: skip
    assert first["time"].endswith("+00:00")
    assert "KeyError: 'gone'" in second["exception"]


@pytest.mark.processes
@pytest.mark.usefixtures("configured")
def test_a_function_that_configures_logging_has_the_last_word(tmp_path: Path) -> None:
    _, lines = spoken(tmp_path, "rank %(rank)d says %(message)s", logs="json")
    assert lines[0] == "rank 1 says loss 7"


@pytest.mark.processes
def test_a_driver_that_has_configured_nothing_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.root, "handlers", [])  # Those of pytest.
    facts, lines = spoken(tmp_path)
    assert facts[0]["level"] == logging.WARNING
    assert lines[0] == "unseen"  # It is a warning, which Python writes as it is.


def test_an_unknown_form() -> None:
    with pytest.raises(BadSetting, match="logs='xml' is unknown; choose one of 'text', 'json'"):
        tr.Gang(logs="xml")  # type: ignore[arg-type]

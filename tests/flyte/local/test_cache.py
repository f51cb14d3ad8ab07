"""Exactly the right steps run again after a change: read from Flyte's own table of runs, without a JVM."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from workflows import Place

HELPERS = """
FACTOR = 2

def doubled(x):
    return inner(x) * FACTOR

def inner(x):
    return x + 0

def unused(x):
    return x
"""
FLOW = """
import sys
sys.path.insert(0, {folder!r})
import flyte
import helpers
from tritium.flyte import cache

env = flyte.TaskEnvironment("steps", cache=cache(salt={salt!r}))
plain = flyte.TaskEnvironment("plain", depends_on=[env])


@env.task
def first(x: int) -> int:
    "Calls a helper, which calls another one."
    return helpers.doubled(x)


@env.task
def second(x: int) -> int:
    import alibrary
    return x + 0 * len(alibrary.__name__)


@env.task
def third(x: int) -> int:
    return x


@plain.task
async def all_of_them(x: int) -> int:
    return await third.aio(await second.aio(await first.aio(x)))
"""


class Steps:
    """A workflow of three steps whose files a test changes."""

    def __init__(self, folder: Path) -> None:
        self.place = Place(folder)
        self.code = folder / "code"
        self.code.mkdir()
        self.salt = ""
        self.helpers(HELPERS)
        self.library("1.0")

    def helpers(self, text: str) -> None:
        (self.code / "helpers.py").write_text(text)

    def library(self, version: str) -> None:
        """Install a library as pip does, as far as its version can be asked for."""
        for old in self.code.glob("*.dist-info/*"):
            old.unlink()
        facts = self.code / f"alibrary-{version}.dist-info"
        facts.mkdir(exist_ok=True)
        (facts / "METADATA").write_text(f"Metadata-Version: 2.1\nName: alibrary\nVersion: {version}\n")
        (facts / "top_level.txt").write_text("alibrary\n")
        (self.code / "alibrary.py").write_text("")

    def ran(self) -> list[str]:
        """Run the workflow, and return the steps that did not come from the cache."""
        before = len(self.place.runs()) if (self.place.folder / "home" / ".flyte").exists() else 0
        flow = self.code / "flow.py"
        flow.write_text(FLOW.format(folder=str(self.code), salt=self.salt))
        played = self.place.play(flow, [("all_of_them", ["3"])], PYTHONDONTWRITEBYTECODE="1")
        assert not played.jvm
        assert "outputs" in played.answers[0], played.text
        runs = self.place.runs()[before:]
        return [task.partition(".")[2] for task, hit, _ in runs if task.startswith("steps.") and not hit]


CHANGES: dict[str, tuple[Callable[[Steps], None], list[str]]] = {
    "nothing": (lambda steps: None, []),
    "a comment": (lambda steps: steps.helpers(f"# A comment.\n{HELPERS}"), []),
    "a helper that is not called": (lambda steps: steps.helpers(HELPERS.replace("return x\n", "return -x\n")), []),
    "a helper's helper": (lambda steps: steps.helpers(HELPERS.replace("x + 0", "x + 1 - 1")), ["first"]),
    "a value": (lambda steps: steps.helpers(HELPERS.replace("FACTOR = 2", "FACTOR = 3")), ["first", "second", "third"]),
    "a library's version": (lambda steps: steps.library("1.1"), ["second"]),
    "the salt": (lambda steps: setattr(steps, "salt", "2"), ["first", "second", "third"]),
}


@pytest.mark.timeout(900)
def test_the_right_steps_run_again(tmp_path: Path) -> None:
    steps = Steps(tmp_path)
    assert steps.ran() == ["first", "second", "third"]
    ran = {}
    for name, (change, _) in CHANGES.items():
        change(steps)
        ran[name] = steps.ran()
        steps.helpers(HELPERS)
        steps.library("1.0")
    assert ran == {name: expected for name, (_, expected) in CHANGES.items()}

"""Trainings that are hit by random faults at any moment of their life, judged by a model of what may become of them.

`make chaos` plays CHAOS_ROUNDS rounds of new seeds, `make chaos CHAOS_SEED=1234` repeats one and prints all that it
does; `make test` plays a few that are always the same.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from chaos.faults import Plan
from chaos.ground import Ground, Grounds
from chaos.rounds import Round

FEW = (42, 60, 82)
FIRST = os.environ.get("CHAOS_SEED")
ROUNDS = int(os.environ.get("CHAOS_ROUNDS") or "1")
PLANS = sorted(
    (Plan.of(seed) for seed in (range(int(FIRST), int(FIRST) + ROUNDS) if FIRST else FEW)),
    key=lambda plan: plan.kind,  # one cluster after the other
)
FIGURES = os.environ.get("CHAOS_FIGURES", "")


@pytest.fixture(scope="module")
def grounds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Grounds]:
    """Yield a cluster for all rounds of its kind. (A parametrized fixture would start one for each.)"""
    found = Grounds(tmp_path_factory.mktemp("chaos"))
    yield found
    found.close()


@pytest.fixture
def there(grounds: Grounds, plan: Plan) -> Ground:
    """Return the cluster of this round; tests/conftest.py requests it before its leak check."""
    return grounds.on(plan.kind)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("plan", [pytest.param(plan, id=plan.name) for plan in PLANS])
def test_a_disturbed_training_ends_as_undisturbed_or_by_an_error_that_the_docs_name(there: Ground, plan: Plan) -> None:
    said: list[str] = []

    def say(text: str) -> None:
        said.append(text)
        print(text, flush=True)

    say(f"\n{plan}")
    played = Round(plan, there, say)
    try:
        played.play()
    except Exception as error:
        played.problems.append(f"the round itself has failed: {error!r}")
        raise
    finally:
        note(played)
        if played.problems:
            say("\n".join(problem[:2000] for problem in played.problems))
            logs = there.logs()
            there.renew()
    if played.problems:
        repeat = f"make chaos CHAOS_SEED={plan.seed}"
        pytest.fail("\n".join([*played.problems, f"Repeat it: {repeat}", *logs]), pytrace=False)


def note(played: Round) -> None:
    """Record the round for the table at the end of `make chaos`."""
    if FIGURES:
        with Path(FIGURES).open("a", encoding="utf-8") as file:
            for figure in played.figures:
                file.write(json.dumps(figure | {"failed": bool(played.problems)}) + "\n")

"""A launch in a young application waits for executors, and counts the last one at whatever moment it registers."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest

from tritium.errors import RunCancelled
from tritium.gang.driver.cancellation import Cancellation
from tritium.gang.settings import Gang
from tritium.spark.cluster import base
from tritium.spark.cluster.standalone import Standalone
from tritium.spark.session import Session


class Young(Standalone):
    """Two executors, of which the second registers right after the given number of questions to the scheduler."""

    def __init__(self, questions: int) -> None:
        application = SimpleNamespace(getTimeAsSeconds=lambda _, __: 20)
        jvm = SimpleNamespace(sc=lambda: SimpleNamespace(conf=lambda: application))
        started = SimpleNamespace(applicationId=f"young-{id(self)}", _jsc=jvm, startTime=time.time() * 1000)
        conf = SimpleNamespace(
            get=lambda name, default: "local-cluster[2,1,1024]" if name == "spark.master" else default
        )
        super().__init__(Session(SimpleNamespace(sparkContext=started, conf=conf)))
        self.questions_left = questions

    def _answer(self) -> int:
        self.questions_left -= 1
        return 1 if self.questions_left >= 0 else 2

    def slots(self, gang: Gang) -> int:
        return self._answer()

    def executors(self) -> int:
        return self._answer()


@pytest.mark.parametrize("questions", range(12))
def test_an_executor_that_registers_between_two_questions_counts(
    questions: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base, "_POLL_SECONDS", 0.0)
    notes: list[str] = []
    assert Young(questions).await_slots(Gang(ranks=2), notes.append, again=False) == 2


def test_a_run_that_is_cancelled_waits_no_longer() -> None:
    cluster, cancellation = Young(10**9), Cancellation()
    cluster.sleep = cancellation.pause
    with pytest.raises(RunCancelled):
        cluster.await_slots(Gang(ranks=2), lambda _: cancellation.request(), again=False)

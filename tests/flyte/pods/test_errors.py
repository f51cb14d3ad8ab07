"""What a pod writes for the backend of each class of error: kind, code and origin, the message, and the report."""

from __future__ import annotations

from pathlib import Path

import pytest

from pods import pod
from workflows import Place

ERRORS = {  # Task → (kind, code, origin) and a part of the message; an exception on a rank is in tests/flyte/local.
    "refuses": ("NON_RECOVERABLE", "ValueError", "USER", "no"),
    "needs_three": ("NON_RECOVERABLE", "NotEnoughSlots", "USER", "3 ranks"),
    "wants_memory": ("NON_RECOVERABLE", "OOM", "USER", "MemoryError"),
    "dies_once": ("RECOVERABLE", "RankFailed", "SYSTEM", "SIGKILL"),
    "is_cut_off": ("RECOVERABLE", "ConnectionResetError", "SYSTEM", "the store does not answer"),
}


@pytest.mark.timeout(900)
@pytest.mark.parametrize("task", ERRORS)
def test_an_error_of_a_pod(task: str, tmp_path: Path) -> None:
    inputs = {"refuses": ["text='no'"], "dies_once": [f"marker={str(tmp_path / 'marker')!r}"]}
    ended = pod(Place(tmp_path), task, *inputs.get(task, [])).run()
    assert ended.outputs is None, ended.log[-3000:]
    assert ended.error is not None, ended.log[-6000:]
    kind, code, origin, text = ERRORS[task]
    facts = tuple(ended.error[name] for name in ("kind", "code", "origin"))
    assert (facts, text in ended.error["message"]) == ((kind, code, origin), True), ended.error["message"]
    assert f"<pre>{code if code != 'OOM' else 'RankFailed'}: " in ended.report
    assert text in ended.report

"""The code of docs/flyte.md runs, as the workflow and as the step of another engine."""

from __future__ import annotations

from pathlib import Path

import pytest

import advice
from workflows import Place

PAGE = Path(__file__).parents[3] / "docs" / "flyte.md"
MORE = """

@spark_env.task(cache="disable")
def calls_step(directory: str) -> int:
    return step(session().range(10).selectExpr("double(id) y"), directory)
"""


@pytest.mark.timeout(900)
def test_the_code_of_the_page(tmp_path: Path) -> None:
    flow = tmp_path / "page.py"
    flow.write_text("\n\n".join(code for _, code in advice.blocks(PAGE, "python")) + MORE)
    place = Place(tmp_path)
    played = place.play(flow, [("whole", ["100"]), ("calls_step", [repr(str(tmp_path / "step"))])])
    assert played.outputs(0) == [pytest.approx(0.99)]
    assert played.outputs(1)[0] in range(4, 7)

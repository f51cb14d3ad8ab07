"""What a backend of Flyte's first version gets, which errors it tries again, and what is refused, without a JVM."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from workflows import FOLDER, SECONDS, Place

GOLDEN = FOLDER / "golden_v1.json"


def test_templates_errors_and_what_is_refused(tmp_path: Path) -> None:
    """A new version of flytekit that changes a template shows here. After a change of ours: write the printed JSON."""
    command = [sys.executable, str(FOLDER / "wire_v1.py"), "facts"]
    done = subprocess.run(
        command, env=Place(tmp_path).environment(), capture_output=True, text=True, check=False, timeout=SECONDS
    )
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout.splitlines()[-1])
    assert facts["tasks"] == json.loads(GOLDEN.read_text()), json.dumps(facts["tasks"], indent=1)
    assert facts["again"] == ["lost", "stalled", "connection"]
    assert "have no slots for 4 ranks: that takes 4." in facts["refused"]
    assert not facts["flyte 2"]

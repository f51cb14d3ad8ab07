"""Run the core suite with each version of Spark and Python, and write the outcomes into docs/clusters/platforms.md.

`matrix.py 4.0.5 4.2.1:3.13` runs these alone; the rows of others stay. JAVA_HOME says which Java. `--short` runs what
.ci/run does, on the oldest Spark and, where it is there, the oldest Python, and writes nothing.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/clusters/platforms.md"
OLDEST, OLDEST_PYTHON = "4.0.5", "3.10"
ALL = (OLDEST, "4.1.4", "4.2.1", "4.3.0", "4.2.1:3.10", "4.2.1:3.13")  # Spark, and a Python other than .venv's
SPARK = ("older", "contract", "exchange", "predict", "on_error", "stream", "estimator", "inside")
FAULTS = ("rank_raises", "python_killed", "cut_short")
CORE = [f"tests/spark/test_{name}.py" for name in SPARK] + [f"tests/faults/test_{name}.py" for name in FAULTS]
ON = "(every_rank_starts or older or predict or on_error) and not local-cluster and not standalone"
SHORT = [CORE[0], *CORE[2:5], "-k", ON]


def run(version: str, tests: list[str]) -> tuple[str, str, str, str, bool]:
    """Return Spark's, Python's and Java's versions, the outcome in words, and whether all have passed."""
    spark, _, other = version.partition(":")
    maker = subprocess.run([ROOT / "scripts/spark-env.sh", spark, other], stdout=subprocess.PIPE, text=True, check=True)
    python = maker.stdout.strip()
    show = "import sys; print('.'.join(map(str, sys.version_info[:2])))"
    shown = subprocess.run([python, "-c", show], stdout=subprocess.PIPE, text=True, check=True).stdout.strip()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        subprocess.run([python, "-m", "pytest", "-q", f"--junitxml={report}", *tests], cwd=ROOT, check=False)
        suite = ElementTree.parse(report).getroot().find("testsuite")
    assert suite is not None
    tests_run, failures, errors, skipped = (
        int(suite.get(key, 0)) for key in ("tests", "failures", "errors", "skipped")
    )
    failed = failures + errors
    outcome = f"{tests_run - failed - skipped} passed" + f", {failed} failed" * bool(failed)
    outcome += f", {skipped} skipped" * bool(skipped)
    return spark, shown, java(), outcome, not failed


def java() -> str:
    home = os.environ.get("JAVA_HOME")
    command = [f"{home}/bin/java" if home else "java", "-version"]
    text = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=True).stderr
    match = re.search(r'version "(\d+)', text)
    return match[1] if match else text.partition("\n")[0]


def write(row: tuple[str, str, str, str]) -> None:
    """Put a row into the page's table, in place of that of the same versions."""
    before, head, table, after = re.split(r"(<!-- matrix -->\n(?:.*\n){3})((?:\|.*\n)*)", PAGE.read_text(), maxsplit=1)
    new = "| " + " | ".join([*row, time.strftime("%Y-%m-%d")]) + " |"
    start = new[: new.index(row[3])]
    rows = sorted([line for line in table.splitlines() if not line.startswith(start)] + [new])
    PAGE.write_text(before + head + "".join(f"{line}\n" for line in rows) + after)


def has(python: str) -> bool:
    """Tell whether this machine has a version of Python, which is not downloaded."""
    command = [ROOT / ".venv/bin/uv", "python", "find", "--no-python-downloads", "--quiet", python]
    return subprocess.run(command, stdout=subprocess.DEVNULL, check=False).returncode == 0


def main() -> int:
    # pyenv has versions that are not on PATH, where uv looks.
    versions = Path(os.environ.get("PYENV_ROOT", "~/.pyenv")).expanduser() / "versions"
    os.environ["PATH"] = os.pathsep.join([os.environ["PATH"], *(str(path) for path in versions.glob("3.*/bin"))])
    if sys.argv[1:] == ["--short"]:
        oldest = f"{OLDEST}:{OLDEST_PYTHON}" if has(OLDEST_PYTHON) else OLDEST
        return 0 if run(oldest, SHORT)[-1] else 1
    passed = True
    for version in sys.argv[1:] or ALL:
        *row, ok = run(version, CORE)
        write(tuple(row))
        passed &= ok
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())

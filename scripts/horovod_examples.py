"""Runs public examples on 2 ranks through Tritium, from checkouts that are given to it.

    .venv/bin/python scripts/horovod_examples.py CHECKOUT [NAME …] [--rossmann DIRECTORY] [--markdown] [--show]

A checkout of Horovod, Petastorm or tensorflow/ecosystem; a name is part of an example's path. `_examples.py` lists
them, with the lines that are replaced: where data would be downloaded, where a number makes it run for hours on two
cores, and where today's TensorFlow, Keras or Lightning refuses a line. The data are generated (`_example_data.py`);
those of the Rossmann examples by examples/rossmann/generate.py. An example that starts its ranks itself gets one line
before its other imports, `import tritium.compat`; for the others it is `tritium run --compat`. No checkout is changed.

Some need packages that Tritium does not bring, such as torchvision: an example whose packages are not there is left
out, and says so. The exit code is 1 where one fails.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import _example_data
from _examples import ECOSYSTEM, HOROVOD, PETASTORM, Example

RANKS = 2
LISTS = {"horovod": HOROVOD, "examples/hello_world": PETASTORM, "spark/spark-tensorflow-distributor": ECOSYSTEM}
"""A path that one of the checkouts has -> its examples."""


@dataclass
class Ran:
    """What became of an example."""

    example: Example
    outcome: str
    seconds: float = 0.0
    output: str = ""


def replaced(source: str, example: Example, places: dict[str, str]) -> str:
    """Return the example's source with its lines replaced. Raises ValueError where one is not found."""
    for old, new in (*example.data, *example.shorter, *example.today):
        if old not in source:
            raise ValueError(f"{example.path} has no {old!r}: it is of another version than the list is for")
        for name, path in places.items():
            new = new.replace(f"{{{name}}}", path)
        source = source.replace(old, new)
    if example.ranks:
        return source
    return re.sub(r"^(?=import |from (?!__future__))", "import tritium.compat\n", source, count=1, flags=re.MULTILINE)


def run(example: Example, checkout: Path, shared: Path, rossmann: str) -> Ran:
    """Run one example in a working directory of its own."""
    path = checkout / example.path
    if not path.is_file():
        return Ran(example, "the checkout has no such file")
    if missing := [name for name in example.needs if importlib.util.find_spec(name) is None]:
        return Ran(example, f"not run: needs {', '.join(missing)}")
    if "{rossmann}" in example.arguments and not rossmann:
        return Ran(example, "not run: needs --rossmann")
    with tempfile.TemporaryDirectory(prefix="tritium-example-", ignore_cleanup_errors=True) as folder:
        work = Path(folder)
        places = {"data": str(shared / "data"), "work": folder, "shared": str(shared), "rossmann": rossmann}
        script = path
        source = path.read_text()
        changed = replaced(source, example, places)
        if changed != source:
            script = work / path.name
            script.write_text(changed)
            for module in path.parent.glob("*.py"):  # that it may import
                if module.name != path.name:
                    shutil.copy(module, work)
        if (checkout / "petastorm").is_dir():
            (work / "examples").symlink_to(checkout / "examples")  # without the package beside it
        arguments = example.arguments.format(**places).split()
        if example.ranks:
            begin = [sys.executable, "-c", "from tritium.cli import main; main()", "run", "--compat"]
            command = [*begin, "--ranks", str(RANKS), *example.options.split(), str(script), *arguments]
        else:
            command = [sys.executable, str(script), *arguments]
        return _finish(example, command, work)


def _finish(example: Example, command: list[str], work: Path) -> Ran:
    env = {
        **os.environ,
        **dict.fromkeys(("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS"), "1"),
        "CUDA_VISIBLE_DEVICES": "",
        "HOME": str(work),
        "PYTHONPATH": os.pathsep.join(filter(None, [str(work), os.environ.get("PYTHONPATH", "")])),
        "PYSPARK_PYTHON": sys.executable,
        "SPARK_LOCAL_IP": "127.0.0.1",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "TRITIUM_RUNS": str(work / "runs"),
        **example.env,
    }
    log = work / "output.log"
    began = time.monotonic()
    with (
        log.open("w") as file,
        subprocess.Popen(
            command, cwd=work, env=env, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        ) as process,
    ):
        try:
            code: int | str = process.wait(timeout=example.limit)
        except subprocess.TimeoutExpired:
            code = f"not done after {example.limit} s"
            os.killpg(process.pid, signal.SIGKILL)
    seconds, output = time.monotonic() - began, log.read_text(errors="replace")
    shown = re.findall(example.shows, output) if example.shows else [""]
    if code == 0 and shown:
        return Ran(example, f"runs{': ' if shown[-1] else ''}{shown[-1].strip()}", seconds, output)
    why = "it prints no result" if code == 0 else _why(output) if isinstance(code, int) else code
    return Ran(example, f"fails: {why}", seconds, output)


def _why(output: str) -> str:
    """Return the line of an error, the first one of a rank if there are several."""
    errors = re.findall(
        r"^(?:\W*)([A-Za-z_.]*(?:Error|Exception|BadSetting|Failed|Refused|Missing)[\w.]*: .*)", output, re.M
    )
    lines = output.strip().splitlines() or ["no output"]
    return (errors[0] if errors else lines[-1])[:240]


def adapted(example: Example) -> str:
    """Return how many lines are replaced, and what for."""
    kinds = (("data", example.data), ("shorter", example.shorter), ("today's API", example.today))
    parts = [f"{len(pairs)} {kind}" for kind, pairs in kinds if pairs]
    if example.env:
        parts.append(", ".join(f"{name}={value}" for name, value in example.env.items()))
    if not example.ranks:
        parts.insert(0, "`import tritium.compat`")
    return ", ".join(parts) or "none"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--rossmann", default="", help="the directory of the CSV files that generate.py has written")
    parser.add_argument("--markdown", action="store_true")
    parser.add_argument("--show", action="store_true", help="print the end of what a failing example has printed")
    options = parser.parse_args()
    checkout = options.checkout.resolve()
    examples = next((listed for path, listed in LISTS.items() if (checkout / path).is_dir()), ())
    chosen = [one for one in examples if not options.names or any(name in one.path for name in options.names)]
    if not chosen:
        parser.error(
            f"{checkout} has none of the examples that are listed: {options.names or 'a checkout of another kind'}"
        )
    commit = subprocess.run(
        ["git", "-C", checkout, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    found = []
    with tempfile.TemporaryDirectory(prefix="tritium-examples-") as folder:
        _example_data.write_all(Path(folder) / "data")
        for example in chosen:
            ran = run(example, checkout, Path(folder), options.rossmann and str(Path(options.rossmann).resolve()))
            found.append(ran)
            print(f"{example.path}: {ran.outcome} ({ran.seconds:.0f} s)", file=sys.stderr, flush=True)
            if options.show and ran.outcome.startswith("fails"):
                print("\n".join(ran.output.splitlines()[-60:]), file=sys.stderr, flush=True)
    rows = [("example", "commit", "adapted lines", "outcome", "s")]
    for ran in found:
        name = ran.example.path.removeprefix("examples/")
        rows.append((name, commit, adapted(ran.example), ran.outcome.replace("|", " "), f"{ran.seconds:.0f}"))
    if options.markdown:
        rows.insert(1, ("---",) * len(rows[0]))
        print("\n".join(f"| {' | '.join(row)} |" for row in rows))
    else:
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        print("\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows))
    return int(any(ran.outcome.startswith("fails") for ran in found))


if __name__ == "__main__":
    sys.exit(main())

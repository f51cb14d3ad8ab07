"""Runs Horovod's own tests against Tritium's `horovod`, on 2 ranks, from a checkout of Horovod that is given to it.

    .venv/bin/python scripts/horovod_tests.py CHECKOUT [torch | tensorflow | FILE …] [--ranks 2] [-k WORDS] [--markdown]

A test has passed where it passed on every rank, and is not applicable where it skips itself, or needs Horovod's own C++
core, which `CORE` says of it; those of test/single are for one rank. Needs the packages mock and parameterized, as
those tests do. Nothing of the checkout is copied or changed. The exit code is 1 where fewer than 90 % of the
applicable tests pass.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import tritium as tr
import tritium.compat

GOAL = 0.9
PATIENCE = 60  # seconds that a test may take
FILES = {
    "torch": (
        "test/parallel/test_torch.py",
        "test/parallel/test_adasum_pytorch.py",
        "test/parallel/test_common.py",
        "test/single/test_torch_elastic.py",
    ),
    "tensorflow": (
        "test/parallel/test_tensorflow.py",
        "test/parallel/test_adasum_tensorflow.py",
        "test/parallel/test_tensorflow_process_sets.py",
        "test/parallel/test_tensorflow_process_sets_dynamic.py",
        "test/parallel/test_process_sets_static.py",
        "test/parallel/test_process_sets_multi_comm.py",
        "test/parallel/test_tensorflow2_keras.py",
        "test/parallel/test_tensorflow2_keras_process_sets.py",
        "test/parallel/test_keras.py",
    ),
}
CORE: dict[str, str] = {}
"""Tests of the core itself -> what of it they look at."""
OTHER = "other"
KINDS = {
    "needs a GPU": r"gpu|NCCL|CUDA|XLA",
    "needs the C++ core": r"MPI|mpi4py|CCL|C\+\+ core|timeline",
}
"""Why a test is not applicable -> what its name or its own reason for being skipped has."""


@dataclass
class Outcome:
    """What became of one test on each rank."""

    name: str
    by_rank: dict[int, tuple[str, str]] = field(default_factory=dict)
    """rank -> "passed", "failed" or "skipped", and why."""

    @property
    def result(self) -> str:
        """One word for all ranks."""
        found = {word for word, _ in self.by_rank.values()}
        return "failed" if "failed" in found else "passed" if "passed" in found else "skipped"

    @property
    def reason(self) -> str:
        """Why it was not passed, as the first rank of which that holds said it."""
        rank, text = next((rank, why) for rank, (word, why) in self.by_rank.items() if word == self.result)
        return text if self.result == "skipped" or len(self.by_rank) == 1 else f"rank {rank}: {text}"


class Recorder:
    """A plugin of pytest that writes what becomes of each test (rank)."""

    def __init__(self, path: Path, done: Sequence[str]) -> None:
        self._path, self._done = path, set(done)

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        """Leave out what has run before a rank was ended."""
        items[:] = [item for item in items if short(item.nodeid) not in self._done]

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Say what runs now: a rank that hangs is ended, and says nothing more."""
        self._write(nodeid, "failed", f"no end within {PATIENCE} s")

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Write the result of the test itself, or of what prepares it or cleans up where that fails."""
        if report.when == "call" or report.outcome != "passed":
            self._write(report.nodeid, report.outcome, reason(report))

    def pytest_collectreport(self, report: Any) -> None:
        """Write that a file can't be imported."""
        if report.outcome != "passed":
            self._write("::import", report.outcome, reason(report))

    def _write(self, nodeid: str, outcome: str, why: str) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps([short(nodeid), outcome, why]) + "\n")


def short(nodeid: str) -> str:
    """Return "Class::test"."""
    return nodeid.partition("::")[2]


def reason(report: Any) -> str:
    """Return one line of why a test was skipped or failed."""
    if report.outcome == "passed":
        return ""
    if isinstance(report.longrepr, tuple):
        return str(report.longrepr[2]).removeprefix("Skipped: ")
    crash = getattr(report.longrepr, "reprcrash", None)
    text = crash.message if crash is not None else str(report.longrepr).strip().splitlines()[-1]
    return " ".join(text.split())[:240]


def stand_ins() -> None:
    """Give what the tests import of Horovod besides its API, a helper of threads, and hide what they do not know.

    They try every optimizer whose module is torch's: Muon is younger than they are, and takes matrices alone.
    """
    import threading

    import torch

    younger: Any = getattr(torch.optim, "Muon", None)
    if younger is not None:
        younger.__module__ = "younger.than.the.tests"

    def in_thread(
        target: Any, args: Any = (), name: str | None = None, daemon: bool = True, silent: bool = False
    ) -> Any:
        thread = threading.Thread(target=target, args=args, name=name, daemon=daemon)
        thread.start()
        return thread

    import horovod.runner as runner

    for name in ("util", "util.threads"):
        module = ModuleType(f"horovod.runner.{name}")
        module.__path__ = []
        module.in_thread = in_thread  # type: ignore[attr-defined]
        sys.modules[module.__name__] = module
    runner.util = sys.modules["horovod.runner.util"]


def rank_main(file: str, folder: str, words: str | None, done: Sequence[str]) -> int:
    """Run the tests of one file in this rank."""
    import pytest

    world = tr.world()
    os.environ.update(
        HOROVOD_RANK=str(world.rank),
        HOROVOD_SIZE=str(world.size),
        HOROVOD_LOCAL_RANK=str(world.local_rank),
        HOROVOD_LOCAL_SIZE=str(world.local_size),
    )
    stand_ins()
    options = [file, "-q", "-p", "no:cacheprovider", "--rootdir", folder, "-c", os.devnull, "--tb=short"]
    options += [f"--timeout={PATIENCE}", "--timeout-method=thread", *(["-k", words] if words else [])]
    return int(pytest.main(options, plugins=[Recorder(Path(folder) / f"{world.rank}.jsonl", done)]))


def tests_of(file: Path, ranks: int, words: str | None, log: Any) -> Iterator[Outcome]:
    """Yield what becomes of the tests of one file. Ranks that hang are started again for those that are left."""
    found: dict[str, Outcome] = {}
    while True:
        with tempfile.TemporaryDirectory(prefix="horovod-tests-") as folder:
            try:
                tr.launch(
                    rank_main,
                    args=(str(file), folder, words, list(found)),
                    **{"ranks": ranks, "on": "driver", "framework": "torch", "retries": 0, "progress": False},
                    output="none",
                )
                ended = None
            except tr.errors.RankFailed as error:
                ended = error
            before = len(found)
            for path in sorted(Path(folder).glob("*.jsonl")):
                for line in path.read_text().splitlines():
                    name, result, why = json.loads(line)
                    found.setdefault(name, Outcome(name)).by_rank[int(path.stem)] = (result, why)
        if ended is None:
            break
        print(f"{file.name}: {ended}", file=log)
        if len(found) == before:
            found["ranks"] = Outcome("start of the ranks", {0: ("failed", str(ended).splitlines()[0])})
            break
    for one in found.values():
        if (why := CORE.get(one.name.rpartition("::")[2])) is not None:
            one.by_rank = {0: ("skipped", why)}
        yield one


def needs(outcome: Outcome) -> str:
    """Return what a test needs that skips itself."""
    text = f"{outcome.name} {outcome.reason}"
    return next((kind for kind, pattern in KINDS.items() if re.search(pattern, text, re.IGNORECASE)), OTHER)


def table(found: dict[str, list[Outcome]]) -> list[list[str]]:
    """Return a row for each file: tests, passed, failed, not applicable by what they need."""
    kinds = [*KINDS, OTHER]
    rows = [["file", "tests", "passed", "failed", *kinds]]
    for name, outcomes in found.items():
        counts = Counter(one.result if one.result != "skipped" else needs(one) for one in outcomes)
        rows.append([name, *map(str, [len(outcomes), counts["passed"], counts["failed"], *(counts[k] for k in kinds)])])
    return [*rows, ["all", *(str(sum(int(row[i]) for row in rows[1:])) for i in range(1, len(rows[0])))]]


def show(rows: list[list[str]], markdown: bool) -> None:
    """Print rows, the first of which are names."""
    if markdown:
        rows = [rows[0], ["---"] * len(rows[0]), *rows[1:]]
        print("\n".join(f"| {' | '.join(row)} |" for row in rows))
        return
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    print("\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("files", nargs="*", default=["torch"])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("-k", dest="words")
    parser.add_argument("--markdown", action="store_true")
    options = parser.parse_args()
    if not (options.checkout / "horovod").is_dir():
        parser.error(f"{options.checkout} is no checkout of Horovod")
    if tritium.compat.status()["horovod"].startswith("installed"):
        parser.error("the real Horovod is installed here, and would be what is tested")
    files = [file for word in options.files for file in FILES.get(word, (word,))]
    found = {}
    for file in files:
        print(f"… {file}", file=sys.stderr, flush=True)
        path = (options.checkout / file).resolve()
        ranks = 1 if path.parent.name == "single" else options.ranks
        found[path.name] = list(tests_of(path, ranks, options.words, sys.stderr))
    commit = subprocess.run(
        ["git", "-C", options.checkout, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    print(f"Horovod {commit.stdout.strip()}, {options.ranks} ranks\n")
    show(table(found), options.markdown)
    every = [one for outcomes in found.values() for one in outcomes]
    for title, result in (("failed", "failed"), ("not applicable", "skipped")):
        lines = [f"- {file} {one.name}: {one.reason}" for file in found for one in found[file] if one.result == result]
        if lines:
            print(f"\n{title}:", *lines, sep="\n")
    passed, failed = (sum(one.result == word for one in every) for word in ("passed", "failed"))
    share = passed / max(1, passed + failed)
    print(f"\n{passed} of {passed + failed} applicable tests pass: {share:.0%}")
    return int(share < GOAL)


if __name__ == "__main__":
    sys.exit(main())

"""What others wrote is read as it was written, or refused by the documented error, whatever was done to its bytes.

`make fuzz` damages them for SECONDS=600 a reader, `make fuzz READER=wire SEED=1234` repeats one case; `make test` plays
a few hundred that are always the same. A case may take 20 seconds of CPU time and a GiB of memory more.
"""

from __future__ import annotations

import contextlib
import os
import random
import resource
import signal
import time
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fuzz.readers import READERS

SECONDS = float(os.environ.get("FUZZ_SECONDS") or "0")
SEED = os.environ.get("FUZZ_SEED")
FEW = {"wire": 2000, "checkpoint": 300, "spool": 500, "model": 200}
CPU_SECONDS, MORE_BYTES = 20, 1 << 30


class Hung(BaseException):
    """A case has taken more than CPU_SECONDS."""


@contextlib.contextmanager
def bounded() -> Iterator[None]:
    """Limit the CPU time and the memory of the block: Hung is raised, or MemoryError."""

    def hung(*_: Any) -> None:
        raise Hung(f"more than {CPU_SECONDS} s of CPU time")

    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limits = resource.getrlimit(resource.RLIMIT_AS)
    handler = signal.signal(signal.SIGVTALRM, hung)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MORE_BYTES, limits[1]))
    signal.setitimer(signal.ITIMER_VIRTUAL, CPU_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        resource.setrlimit(resource.RLIMIT_AS, limits)
        signal.signal(signal.SIGVTALRM, handler)


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error, and what it was raised from."""
    while error is not None:
        yield error
        error = error.__cause__


def seeds(name: str) -> Iterator[int]:
    """Yield the seeds of the cases to come."""
    first = int(SEED or "0")
    if SECONDS:
        until = time.monotonic() + SECONDS
        while time.monotonic() < until:
            yield first
            first += 1
    else:
        yield from range(first, first + (1 if SEED else FEW[name]))


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="limits memory as Linux does")
@pytest.mark.timeout(SECONDS + 300)
@pytest.mark.usefixtures("saved_elsewhere")
@pytest.mark.parametrize("name", READERS)
def test_what_is_damaged_is_refused_or_read_as_it_was(name: str, tmp_path: Path) -> None:
    reader, errors = READERS[name]
    cases, refused = 0, 0
    findings: dict[str, str] = {}
    with reader(tmp_path) as case, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for seed in seeds(name):
            cases += 1
            try:
                with bounded():
                    case(random.Random(seed))
            except KeyboardInterrupt:
                raise
            except BaseException as error:
                chain = list(causes(error))
                refused += isinstance(error, errors)
                if isinstance(error, errors) and not any(isinstance(one, MemoryError) for one in chain):
                    continue
                where = traceback.extract_tb(chain[-1].__traceback__)[-1]
                place = f"{type(error).__name__} at {Path(where.filename).name}:{where.lineno}"
                if SEED and not SECONDS:
                    raise
                findings.setdefault(place, f"{place}: {error!s:.300}\n  repeat it: make fuzz READER={name} SEED={seed}")
                if len(findings) == 20:
                    break
    print(f"{name}: {cases:,} cases from seed {SEED or 0}, {refused:,} refused, {len(findings)} findings")
    if findings:
        pytest.fail("\n".join(findings.values()), pytrace=False)
    assert SEED or 0 < refused < cases, "the damages are none, or all of one kind"

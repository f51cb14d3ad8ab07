"""A rank's process, where the system lacks a feature, and what it inherits from Spark's worker."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

WITHOUT_WAITID = """
import os, signal, sys
for name in ("waitid", "P_PID", "WEXITED", "WNOWAIT"):
    delattr(os, name)
import tritium as tr

def train():
    world = tr.world()
    world.barrier()
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    world.barrier()

assert tr.launch(lambda: tr.world().rank, ranks=2, on="driver", progress=False) == [0, 1]
try:
    tr.launch(train, ranks=2, on="driver", progress=False, retries=0)
except tr.errors.RankFailed as error:
    print(error.rank, error.signal)
"""


@pytest.mark.timeout(60)
def test_without_waitid_as_on_macos_a_killed_rank_is_found(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_WAITID], capture_output=True, text=True, timeout=50, cwd=tmp_path
    )
    assert (done.stdout, done.returncode) == ("1 SIGKILL\n", 0), done.stderr


LIMITED = """
import ctypes, os, resource, sys
import tritium as tr
from tritium.errors import BadSetting

def limits():
    import resource
    return resource.getrlimit(resource.RLIMIT_AS)

os.environ["PYSPARK_EXECUTOR_MEMORY_MB"] = "8192"  # as Spark's worker does
resource.setrlimit(resource.RLIMIT_AS, (8192 << 20, 8192 << 20))
try:
    print(tr.launch(limits, ranks=1, on="driver", progress=False, retries=0))
except BadSetting as error:
    print(error)
"""


def _limited(tmp_path: Path, *, privileged: bool) -> str:
    import ctypes

    prctl = ctypes.CDLL(None).prctl  # before the fork: it must not import
    drop = None if privileged else lambda: prctl(24, 24, 0, 0, 0)  # PR_CAPBSET_DROP, CAP_SYS_RESOURCE: at the next exec
    done = subprocess.run(
        [sys.executable, "-c", LIMITED], capture_output=True, text=True, timeout=50, cwd=tmp_path, preexec_fn=drop
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.skipif(sys.platform != "linux", reason="the limit holds on Linux only")
class TestSparksLimitOfAddressSpace:
    def test_is_taken_from_a_rank_where_that_is_allowed(self, tmp_path: Path) -> None:
        status = Path("/proc/self/status").read_text().partition("CapEff:")[2].split()[0]
        if not int(status, 16) >> 24 & 1:
            pytest.skip("needs CAP_SYS_RESOURCE")
        assert _limited(tmp_path, privileged=True) == "[(-1, -1)]\n"

    def test_else_is_an_error_that_names_the_setting(self, tmp_path: Path) -> None:
        said = _limited(tmp_path, privileged=False)
        assert said.startswith("spark.executor.pyspark.memory limits the address space"), said
        assert "to 8192 MB" in said
        assert "spark.executor.memoryOverhead" in said

"""What a rank finds in its process: the environment, and how its memory is allocated."""

from __future__ import annotations

import os
import platform
import sys
from typing import Any

import pytest

import tritium as tr

pytestmark = pytest.mark.processes
QUIET: dict[str, Any] = {"ranks": 1, "on": "driver", "progress": False, "output": "none"}


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc returns freed memory to the system")
@pytest.mark.parametrize(("env", "kept"), [({}, True), ({"MALLOC_TRIM_THRESHOLD_": str(1 << 17)}, False)])
def test_what_a_step_frees_is_kept_for_the_next_unless_the_user_has_set_limits(env: dict[str, str], kept: bool) -> None:
    def steps() -> int:
        import resource

        def step() -> None:
            [bytearray(20 << 20) for _ in range(3)]

        step()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(5):
            step()
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    (faults,) = tr.launch(steps, env=env, **QUIET)
    pages = 5 * 3 * (20 << 20) // os.sysconf("SC_PAGE_SIZE")
    assert (faults < pages / 10) == kept, f"{faults} of {pages} pages"


@pytest.mark.skipif(sys.platform != "linux", reason="ranks are forked on Linux alone")
@pytest.mark.parametrize("own", [None, "1"])
def test_torch_looks_for_gpus_as_the_user_says_after_the_fork(own: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """With NVML, which is for the process that forks, an optimizer's look takes 40 to 200 µs a step."""

    def look() -> str | None:
        return os.environ.get("PYTORCH_NVML_BASED_CUDA_CHECK")

    monkeypatch.delenv("PYTORCH_NVML_BASED_CUDA_CHECK", raising=False)  # importing Lightning sets it
    env = {} if own is None else {"PYTORCH_NVML_BASED_CUDA_CHECK": own}
    assert tr.launch(look, env=env, framework="torch", **QUIET) == [own]

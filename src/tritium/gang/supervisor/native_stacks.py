"""The stacks of a rank with its C functions, by py-spy where that is installed (supervisor)."""

from __future__ import annotations

import os
import queue
import shutil
import subprocess
import sysconfig
import threading
from collections.abc import Iterable

from tritium.wire import clip

_FIRST_THREAD = "\nThread "
"""Before it stands the process's command line."""
_REASON_BYTES = 1000


def find_spy(folders: Iterable[str]) -> str | None:
    """Return the path of py-spy: in one of these folders, beside this Python, or on PATH; None where it is not."""
    path = [*folders, sysconfig.get_path("scripts"), os.environ.get("PATH", os.defpath)]
    return shutil.which("py-spy", path=os.pathsep.join(path))


def native_stacks(spy: str, pid: int, seconds: float) -> str:
    """Return the stacks of a process, or why there are none, after at most so many seconds.

    A py-spy that takes longer is left to itself: it ends soon, or with the process.
    """
    answers: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=lambda: answers.put(_dump(spy, pid)), name="tritium-py-spy", daemon=True).start()
    try:
        return answers.get(timeout=max(0.0, seconds))
    except queue.Empty:
        return f"py-spy gave no native stacks in {seconds:.1f} s.\n"


def _dump(spy: str, pid: int) -> str:
    command = [spy, "dump", "--native", "--pid", str(pid)]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    except OSError as error:
        return f"py-spy gave no native stacks: {error}\n"
    stacks = done.stdout.decode(errors="replace")
    if done.returncode:
        reason = clip(done.stderr.decode(errors="replace").strip(), _REASON_BYTES)
        return f"py-spy gave no native stacks: {reason}\n"
    return f"Native stacks, by py-spy:\n{stacks[max(0, stacks.find(_FIRST_THREAD)) :]}"

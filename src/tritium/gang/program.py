"""A script, a module or a compiled program, run as it is in every rank (driver makes it, rank runs it)."""

from __future__ import annotations

import linecache
import os
import runpy
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Literal

from tritium.definitions import SPAWNED
from tritium.frameworks.mpi import DESCRIPTOR

ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
"""The signals that are passed on to a program."""
Kind = Literal["script", "module", "program"]


@dataclass(frozen=True)
class Program:
    """A program in place of a function. Calling it runs it, and returns None when it ends with exit code 0.

    kind    : "script" (a Python file), "module" (as `python -m`), "program" (any other executable file).
    path    : the absolute path of the file on the driver; the name of the module.
    args    : sys.argv[1:] of Python; the arguments of a program.
    content : the content of the file, which need not be on the executors; empty for a module.
    """

    kind: Kind
    path: str
    args: tuple[str, ...]
    content: bytes = b""

    def __call__(self) -> None:
        try:
            if self.kind == "program":
                self._execute()
            elif self.kind == "module":
                sys.argv = [self.path, *self.args]  # The function below sets the first one to the file.
                runpy.run_module(self.path, run_name="__main__", alter_sys=True)
            else:
                self._interpret()
        except SystemExit as end:
            if end.code not in (None, 0):
                raise

    @property
    def files(self) -> dict[str, bytes]:
        """The files of the module SPAWNED, which processes that a script spawns run where it is not on the executor."""
        if self.kind != "script":
            return {}
        place = "__file__.removesuffix('.py') + '.script'"
        source = f"content = __loader__.get_data({place})\n__file__ = {self.path!r}\n"
        source += "exec(compile(content, __file__, 'exec'))\n"
        return {f"{SPAWNED}.py": source.encode(), f"{SPAWNED}.script": self.content}

    def _interpret(self) -> None:
        """Run a script as `python script.py` would; its directory is first in `sys.path`, where it exists."""
        sys.argv = [self.path, *self.args]
        sys.path.insert(0, os.path.dirname(self.path))
        main = ModuleType("__main__")
        main.__dict__.update(__file__=self.path, __builtins__=__builtins__)
        if not self._is_here():
            main.__spec__ = ModuleSpec(SPAWNED, None)
        sys.modules["__main__"] = main
        text = self.content.decode("utf-8", "replace")
        linecache.cache[self.path] = (len(text), None, text.splitlines(keepends=True), self.path)  # Tracebacks read it.
        exec(compile(self.content, self.path, "exec", dont_inherit=True), main.__dict__)

    def _execute(self) -> None:
        """Run a program as a child, with this process's environment and the descriptor that its MPI needs."""
        sys.stdout.flush()
        pmi = os.environ.get(DESCRIPTOR)
        with self._executable() as (file, descriptors):
            descriptors += [] if pmi is None else [int(pmi)]
            child = subprocess.Popen([self.path, *self.args], executable=file, pass_fds=descriptors)
            for number in ENDING:
                signal.signal(number, lambda number, _: child.send_signal(number))
            code = child.wait()
        if code < 0:  # This process ends as the program did, so that the failure names its signal.
            if code != -signal.SIGKILL:
                signal.signal(-code, signal.SIG_DFL)
            os.kill(os.getpid(), -code)
        if code:
            raise SystemExit(code)

    @contextmanager
    def _executable(self) -> Iterator[tuple[str, list[int]]]:
        """Give a file to execute, and the descriptors that it must inherit: the file itself where it is here, too."""
        if self._is_here():
            yield self.path, []
        elif hasattr(os, "memfd_create"):
            with os.fdopen(os.memfd_create("tritium-program", 0), "wb") as file:
                file.write(self.content)
                file.flush()
                # Opened for reading, as the kernel executes no file that is open for writing.
                number = os.open(f"/proc/self/fd/{file.fileno()}", os.O_RDONLY)
            try:
                yield f"/proc/self/fd/{number}", [number]
            finally:
                os.close(number)
        else:
            with tempfile.TemporaryDirectory(prefix="tritium-program-") as folder:
                path = os.path.join(folder, os.path.basename(self.path))
                with open(path, "wb") as file:
                    file.write(self.content)
                os.chmod(path, 0o700)
                yield path, []

    def _is_here(self) -> bool:
        try:
            with open(self.path, "rb") as file:
                return file.read() == self.content and (self.kind == "script" or os.access(self.path, os.X_OK))
        except OSError:
            return False

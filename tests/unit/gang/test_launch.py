"""Gangs without a JVM: `on="driver"` (child processes of this one) and `on="here"` (this process)."""

from __future__ import annotations

import errno
import functools
import importlib.util
import json
import math
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import psutil
import pytest

import tritium as tr
from bounds import within
from clusters import wait
from tritium.errors import (
    BadSetting,
    RankFailed,
    ResultError,
    StartTimeout,
    StoreFailed,
    TritiumError,
    WrongVersion,
)
from tritium.observe.stored import StoredFiles

SECONDS = 5.0  # within which the ranks of an ended run are gone


def run(fn: Callable[..., Any], ranks: int = 2, **settings: Any) -> list[Any]:
    return tr.launch(fn, ranks=ranks, on="driver", **{"progress": False, "output": "none", "retries": 0, **settings})


def failed(fn: Callable[..., Any], ranks: int = 2, **settings: Any) -> RankFailed:
    with pytest.raises(RankFailed) as caught:
        run(fn, ranks, **settings)
    return caught.value


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


class Net:
    """A class of the user's."""

    def __init__(self, scale: int) -> None:
        self.scale = scale

    def train(self, x: int) -> int:
        return self.scale * x + tr.world().rank

    @classmethod
    def made(cls) -> Net:
        return cls(tr.world().rank)

    def __call__(self) -> str:
        return f"called with {self.scale}"


def module_at(path: Path, source: str) -> ModuleType:
    """Return the user's own module, in a place that no rank has on its path."""
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.processes
class TestResults:
    def test_come_in_rank_order(self) -> None:
        assert run(lambda: (tr.world().rank, tr.world().size), ranks=3) == [(0, 3), (1, 3), (2, 3)]

    def test_none(self) -> None:
        assert run(lambda: None) == [None, None]

    def test_arguments(self) -> None:
        assert run(lambda a, *, b: (a, b), ranks=1, args=([1],), kwargs={"b": {2}}) == [([1], {2})]

    def test_a_closure(self) -> None:
        factor = 7
        assert run(lambda: factor * tr.world().rank) == [0, 7]

    def test_methods(self) -> None:
        assert run(Net(10).train, args=(2,)) == [20, 21]
        assert [net.scale for net in run(Net.made)] == [0, 1]
        assert run(functools.partial(Net.train, Net(3), 1)) == [3, 4]
        assert run(Net(4), ranks=1) == ["called with 4"]

    def test_a_function_of_a_notebook_cell(self) -> None:
        cell: dict[str, Any] = {"__name__": "__main__", "tr": tr}
        exec("def helper(x): return x + 1\ndef train(): return helper(tr.world().rank)", cell)
        assert run(cell["train"]) == [1, 2]

    def test_a_function_of_the_users_own_module(self, tmp_path: Path) -> None:
        source = "STEP = 5\ndef helper(x):\n    return x * STEP\ndef train():\n    return helper(3)\n"
        module = module_at(tmp_path / "my_training.py", source)
        try:
            assert run(module.train, ranks=1) == [15]
        finally:
            del sys.modules["my_training"]

    def test_of_any_picklable_kind(self) -> None:
        def result() -> list[Any]:
            return [{"a": (1, None)}, np.arange(3.0), Net(5), lambda x: x + 1, b"\0", ValueError("as a value"), Net]

        ((mapping, array, net, function, data, error, kind),) = run(result, ranks=1)
        assert (mapping, array.tolist(), function(1), data) == ({"a": (1, None)}, [0.0, 1.0, 2.0], 2, b"\0")
        assert isinstance(net, Net)  # the very class that is here
        assert kind is Net
        assert str(error) == "as a value"

    def test_large_ones(self) -> None:
        megabytes = 40
        for rank, array in enumerate(run(lambda: np.full(megabytes << 17, tr.world().rank, np.int64))):
            assert array.nbytes == megabytes << 20
            assert (array[0], array[-1], array.sum()) == (rank, rank, rank * (megabytes << 17))

    def test_one_that_cant_be_pickled_is_named_with_its_rank(self) -> None:
        def result() -> Any:
            return threading.Lock() if tr.world().rank == 1 else 0

        with pytest.raises(ResultError, match=r"The result of rank 1, a lock, can't be pickled: .*world\.store") as e:
            run(result)
        assert e.value.rank == 1

    @pytest.mark.processes
    def test_one_that_the_disk_does_not_take_says_where_and_how_much(self) -> None:
        def result() -> bytes:
            import resource

            _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))  # as full, for this process
            return bytes(1 << 20)

        with pytest.raises(ResultError, match=r"The result of rank 0, a bytes, can't be written: File too large") as e:
            run(result, 1)
        assert f"{e.value.needed:,} bytes are needed in {tempfile.gettempdir()} of " in str(e.value)
        assert f"and {e.value.free:,} are free" in str(e.value)
        assert e.value.needed > 1 << 20

    def test_one_that_cant_be_rebuilt_here_is_named_with_its_rank(self) -> None:
        class Fickle:
            def __reduce__(self) -> Any:
                return (int, ("no number",))

        with pytest.raises(ResultError, match=r"The result of rank 0 can't be rebuilt on the driver: ValueError"):
            run(lambda: Fickle() if tr.world().rank == 0 else 1)


class Refused(Exception):
    """An exception of the user's with a constructor of its own."""

    def __init__(self, code: int, *, why: str) -> None:
        super().__init__(f"{code}: {why}")
        self.code = code

    def __reduce__(self) -> Any:
        return functools.partial(Refused, self.code, why="rebuilt"), ()


class Careless(Exception):
    """An exception that can't be rebuilt: pickle's arguments do not fit its constructor."""

    def __init__(self, code: int, why: str) -> None:
        super().__init__(f"{code}: {why}")


@pytest.mark.processes
class TestExceptions:
    def test_arrive_with_type_message_traceback_rank_host_pid_and_log(self) -> None:
        def train() -> None:
            print("loading")
            print(f"pid {os.getpid()}", file=sys.stderr)
            tr.world().barrier()
            if tr.world().rank == 1:
                raise KeyError("no such column")  # here
            time.sleep(600)

        error = failed(train, 3)
        assert type(error.__cause__) is KeyError
        assert error.__cause__.args == ("no such column",)
        assert (error.rank, error.host, error.signal, error.exit_code) == (1, socket.gethostname(), None, None)
        assert sorted(error.log) == ["loading", f"pid {error.pid}"]
        assert "raise KeyError" in error.traceback
        assert "in train" in error.traceback
        assert "tritium/gang" not in error.traceback  # only what is the user's
        first = str(error).splitlines()[0]
        assert first == f"Rank 1 on {error.host} (pid {error.pid}) raised KeyError: 'no such column'."
        for part in (error.traceback.rstrip(), "loading", error.run_dir):
            assert part in str(error)

    def test_keep_their_own_type(self) -> None:
        def train() -> None:
            raise Refused(7, why="no")

        cause = failed(train).__cause__
        assert type(cause) is Refused
        assert cause.code == 7

    @pytest.mark.parametrize("kind", ["careless", "holds a lock"])
    def test_that_cant_be_pickled_arrive_as_text(self, kind: str) -> None:
        def train() -> None:
            if kind == "careless":
                raise Careless(3, "a reason")
            error = ValueError("a reason")
            error.lock = threading.Lock()  # type: ignore[attr-defined]
            raise error

        error = failed(train, 1)
        assert error.__cause__ is None
        assert "a reason" in str(error).splitlines()[0]
        assert "in train" in error.traceback
        assert "can't be pickled" in error.log[0]

    def test_chained_ones_keep_the_chain_in_the_traceback(self) -> None:
        def train() -> None:
            try:
                {}["key"]
            except KeyError as error:
                raise ValueError("outer") from error

        error = failed(train, 1)
        assert "KeyError: 'key'" in error.traceback
        assert "direct cause" in error.traceback

    def test_tritiums_own_are_raised_as_they_are(self) -> None:
        with pytest.raises(BadSetting, match=r"There is no shard 'train'\. There are: none") as caught:
            run(lambda: tr.world().shard("train"))
        assert caught.value.rank in (0, 1)

    def test_the_first_one_counts(self) -> None:
        def train() -> None:
            world = tr.world()
            if world.rank == 1:
                raise ValueError("the first")
            world.barrier()

        assert failed(train, 3).rank == 1

    def test_keyboard_interrupt_in_a_rank(self) -> None:
        def train() -> None:
            raise KeyboardInterrupt

        assert type(failed(train).__cause__) is KeyboardInterrupt

    def test_come_within_two_seconds_and_the_others_are_gone(self, tmp_path: Path) -> None:
        def train() -> None:
            world = tr.world()
            Path(tmp_path, str(world.rank)).write_text(str(os.getpid()))
            world.barrier()
            if world.rank == 0:
                raise ValueError(time.time())
            time.sleep(600)

        error = failed(train, 3)
        within("rank raises", time.time() - error.__cause__.args[0])  # type: ignore[union-attr]
        assert [alive(int(Path(tmp_path, str(rank)).read_text())) for rank in range(3)] == [False] * 3


@pytest.mark.processes
class TestDeaths:
    @pytest.mark.parametrize("name", ["SIGKILL", "SIGSEGV"])
    def test_a_signal_is_named(self, name: str) -> None:
        def train() -> None:
            print("almost there")
            world = tr.world()
            world.barrier()
            if world.rank == 1:
                os.kill(os.getpid(), getattr(signal, name))
            time.sleep(600)

        error = failed(train)
        assert (error.rank, error.signal) == (1, name)
        assert f"(pid {error.pid}) was killed by {name}" in str(error)
        assert (" of memory" in str(error)) == (name == "SIGKILL")
        assert "almost there" in error.log  # after a crash, with the stack where it happened

    def test_os_exit_is_named_with_its_code(self) -> None:
        error = failed(lambda: os._exit(3))
        assert error.exit_code == 3
        assert "left with exit code 3 before its function returned" in str(error)

    def test_os_exit_0_before_returning_is_a_failure_all_the_same(self) -> None:
        assert failed(lambda: os._exit(0)).exit_code == 0

    @pytest.mark.parametrize("code", [0, 2, None])
    def test_sys_exit_before_returning_is_an_error(self, code: int | None) -> None:
        def train() -> None:
            sys.exit(code)

        error = failed(train)
        assert f"sys.exit({code!r}) instead of returning" in str(error)
        assert "sys.exit(code)" in error.traceback

    def test_what_a_rank_has_started_ends_with_it(self, tmp_path: Path) -> None:
        def train() -> None:
            child = subprocess.Popen(["sleep", "600"])
            Path(tmp_path, "pid").write_text(str(child.pid))
            raise ValueError("with a child")

        failed(train, 1)
        pid = int(Path(tmp_path, "pid").read_text())
        wait(lambda: not alive(pid), "the rank's child is gone", SECONDS)

    def test_a_thread_of_the_users_does_not_keep_a_failed_rank(self) -> None:
        def train() -> None:
            threading.Thread(target=time.sleep, args=(600,)).start()
            raise ValueError("with a thread")

        assert str(failed(train).__cause__) == "with a thread"


@pytest.mark.processes
class TestTalk:
    def test_gather_gives_everyone_everything(self) -> None:
        def train() -> list[Any]:
            world = tr.world()
            return [world.gather({"rank": world.rank, "net": Net(world.rank)}), world.gather(None), world.gather(b"")]

        for told, none, empty in run(train, 3):
            assert [(t["rank"], t["net"].scale) for t in told] == [(0, 0), (1, 1), (2, 2)]
            assert (none, empty) == ([None] * 3, [b""] * 3)

    def test_barrier_is_one(self, tmp_path: Path) -> None:
        def train() -> list[bool]:
            world, seen = tr.world(), []
            for k in range(20):
                Path(tmp_path, f"{k}-{world.rank}").touch()
                world.barrier()
                seen.append(all(Path(tmp_path, f"{k}-{rank}").exists() for rank in range(world.size)))
            return seen

        assert run(train, 3) == [[True] * 20] * 3

    def test_peers(self) -> None:
        peers, again = run(lambda: (tr.world().peers, os.getpid()))
        assert peers[0] == again[0]
        assert [(p.rank, p.local_rank, p.host, p.address, p.device) for p in peers[0]] == [
            (rank, rank, socket.gethostname(), "127.0.0.1", "cpu") for rank in range(2)
        ]
        assert [p.pid for p in peers[0]] == [peers[1], again[1]]

    def test_ranks_that_disagree_are_told(self) -> None:
        def train() -> None:
            world = tr.world()
            world.barrier()
            world.gather(1) if world.rank == 0 else world.barrier()

        with pytest.raises(TritiumError, match=r"call 2: rank 0 calls gather\(\), rank 1 calls barrier\(\)"):
            run(train)

    def test_a_rank_that_has_returned_is_not_waited_for(self) -> None:
        with pytest.raises(TritiumError, match=r"rank 1 has returned and will never reach barrier\(\)"):
            run(lambda: tr.world().rank == 1 or tr.world().barrier())


@pytest.mark.processes
class TestEnvironment:
    def test_is_torchruns_and_the_users(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("FROM_THE_DRIVER", "kept")
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "OMP_NUM_THREADS", "MINE")
        names += ("FROM_THE_DRIVER",)
        seen = run(lambda: [os.environ.get(name) for name in names], cpus=3, env={"MINE": "ü"})
        assert seen == [[str(rank), "2", str(rank), "2", "127.0.0.1", "3", "ü", "kept"] for rank in range(2)]
        assert "MINE" not in os.environ

    def test_env_is_set_before_anything_is_imported(self) -> None:
        assert run(lambda: sys.flags.hash_randomization, ranks=1, env={"PYTHONHASHSEED": "0"}) == [0]

    def test_the_master_port_is_held_until_used(self) -> None:
        def train() -> tuple[int | None, str]:
            world, address = tr.world(), ("127.0.0.1", int(os.environ["MASTER_PORT"]))
            taken = None
            if world.rank == 0:
                with socket.socket() as thief:  # as a program that looks for a free port would
                    try:
                        thief.bind(address)
                    except OSError as error:
                        taken = error.errno
                with socket.create_server(address) as store:  # as a framework does: SO_REUSEADDR
                    world.barrier()
                    client, _ = store.accept()
                    client.sendall(b"hello")
                    client.close()
                return taken, ""
            world.barrier()
            with socket.create_connection(address) as client:
                return taken, client.recv(5).decode()

        assert run(train) == [(errno.EADDRINUSE, ""), (None, "hello")]

    def test_torch_finds_its_threads_and_its_gang(self) -> None:
        def train() -> tuple[int, float, bool]:
            imported = "torch" in sys.modules
            import torch
            import torch.distributed as dist

            dist.init_process_group("gloo")
            total = torch.tensor(float(dist.get_rank() + 1))
            dist.all_reduce(total)
            dist.destroy_process_group()
            return torch.get_num_threads(), total.item(), imported

        assert run(train, framework="torch", cpus=1) == [(1, 3.0, True)] * 2

    @pytest.mark.parametrize("framework", ["torch", None])
    def test_a_ddp_module_may_outlive_its_process_group(self, framework: str | None) -> None:
        def train() -> int:
            import torch
            import torch.distributed as dist
            from torch.nn.parallel import DistributedDataParallel

            for _ in range(6):  # torch alone waits for ever in the destructor, most often the first time
                dist.init_process_group("gloo")
                model = DistributedDataParallel(torch.nn.Linear(64, 64))
                for _ in range(5):
                    model(torch.randn(8, 64)).sum().backward()
                dist.destroy_process_group()
                del model
            return 6

        assert run(train, framework=framework) == [6, 6]

    def test_a_framework_that_is_missing_is_named_with_host_and_command(self, tmp_path: Path) -> None:
        (tmp_path / "torch.py").write_text("raise ImportError(\"No module named 'torch'\")\n")
        command = rf"torch can't be imported on {socket.gethostname()} by .*Install it there: .*-m pip install torch"
        with pytest.raises(WrongVersion, match=command):
            run(lambda: None, framework="torch", env={"PYTHONPATH": str(tmp_path)})


@pytest.mark.processes
class TestOutput:
    def speak(self) -> None:
        print("out", tr.world().rank)
        print("err", file=sys.stderr)
        os.system("echo of a child")
        print("no newline", end="")

    def test_has_its_rank_in_front_and_is_whole_in_the_run_directory(
        self, capsys: pytest.CaptureFixture[str], tmp_path: Path
    ) -> None:
        run(self.speak, output="all", run_dir=str(tmp_path / "run"))
        shown = capsys.readouterr().out.splitlines()
        for rank in range(2):
            said = [f"out {rank}", "err", "of a child", "no newline"]
            assert sorted(line for line in shown if line.startswith(f"[rank {rank}] ")) == sorted(
                f"[rank {rank}] {line}" for line in said
            )
            log = (tmp_path / "run" / "logs" / f"rank-{rank}.log").read_text()
            assert sorted(log.splitlines()) == sorted(said)

    @pytest.mark.parametrize(("output", "shown"), [("rank 0", ["[rank 0] out 0"]), ("none", [])])
    def test_is_shown_as_asked_and_kept_whole(
        self, output: str, shown: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
    ) -> None:
        run(lambda: print("out", tr.world().rank), output=output, run_dir=str(tmp_path / "run"))
        assert capsys.readouterr().out.splitlines() == shown
        assert [(tmp_path / f"run/logs/rank-{rank}.log").read_text() for rank in range(2)] == ["out 0\n", "out 1\n"]

    def test_appears_while_the_job_runs(self, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        shown = ""

        def train() -> None:
            print("step 1")
            wait(lambda: Path(tmp_path, "seen").exists(), "the driver has shown the line")

        thread = threading.Thread(target=run, args=(train, 1), kwargs={"output": "all"})
        thread.start()

        def seen() -> bool:
            nonlocal shown
            shown += capsys.readouterr().out
            return "[rank 0] step 1" in shown

        wait(seen, "the line is shown", 30)
        Path(tmp_path, "seen").touch()
        thread.join()

    def test_much_of_it_is_whole(self, tmp_path: Path) -> None:
        def train() -> None:
            for k in range(3000):
                print(k, "ü" * 97)
                print(k, "€" * 50, file=sys.stderr)

        run(train, ranks=1, run_dir=str(tmp_path / "run"))
        lines = (tmp_path / "run/logs/rank-0.log").read_text().splitlines()
        assert [line for line in lines if "ü" in line] == [f"{k} {'ü' * 97}" for k in range(3000)]
        assert [line for line in lines if "€" in line] == [f"{k} {'€' * 50}" for k in range(3000)]

    def test_of_a_rank_that_dies_is_whole(self, tmp_path: Path) -> None:
        def train() -> None:
            for k in range(5000):
                print(k)
            os.kill(os.getpid(), signal.SIGKILL)

        error = failed(train, 1, run_dir=str(tmp_path / "run"))
        assert (tmp_path / "run/logs/rank-0.log").read_text() == "".join(f"{k}\n" for k in range(5000))
        assert error.log == [str(k) for k in range(4980, 5000)]


@pytest.mark.processes
class TestRunDirectory:
    def events(self, folder: Path, kind: str) -> list[dict[str, Any]]:
        lines = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
        return [line for line in lines if line["kind"] == kind]

    def test_has_what_ranks_log(self, tmp_path: Path) -> None:
        def train() -> None:
            for step in range(3):
                tr.world().log(step=step, steps=3, epoch=0, epochs=1, rows=10 * step, loss=1 / (step + 1))

        run(train, run_dir=str(tmp_path / "run"))
        logged = self.events(tmp_path / "run", "log")
        assert [(e["step"], e["rows"], e["values"]) for e in logged if e["rank"] == 1] == [
            (0, 0, {"loss": 1.0}),
            (1, 10, {"loss": 0.5}),
            (2, 20, {"loss": 1 / 3}),
        ]
        assert len(self.events(tmp_path / "run", "rank_ended")) == 2
        (ended,) = self.events(tmp_path / "run", "ended")
        assert ended["ok"] is True

    def test_says_how_it_ended(self, tmp_path: Path) -> None:
        failed(lambda: 1 / 0, 1, run_dir=str(tmp_path / "run"))
        (event,) = self.events(tmp_path / "run", "failed")
        assert (event["rank"], event["type"], event["text"]) == (0, "ZeroDivisionError", "division by zero")
        assert self.events(tmp_path / "run", "ended")[0]["ok"] is False

    def test_values_of_env_are_not_written_down(self, tmp_path: Path) -> None:
        run(lambda: None, ranks=1, env={"TOKEN": "s3cr3t-value"}, run_dir=str(tmp_path / "run"))
        for path in (tmp_path / "run").rglob("*"):
            assert path.is_dir() or "s3cr3t-value" not in path.read_text()

    def test_what_is_no_number_cant_be_logged(self) -> None:
        with pytest.raises(BadSetting, match=r"world\.log takes numbers: loss='low' is none"):
            run(lambda: tr.world().log(loss="low"), 1)  # type: ignore[arg-type]

    @pytest.mark.parametrize(
        ("folder", "name"), [("stored?sig=abc", "w.bin"), ("stored", "w?.bin"), ("fold[1]", "w.bin"), ("x", "f[0].bin")]
    )
    def test_signs_of_patterns_in_a_name_stand_for_themselves(self, folder: str, name: str, tmp_path: Path) -> None:
        import fsspec

        files, root = fsspec.filesystem("memory"), f"/{tmp_path.name}/{folder}"
        files.pipe_file(f"{root}/wx.bin.part", b"another's")
        for content in (b"first", b"second"):
            run(lambda content=content: tr.world().store(name, content), 1, run_dir=f"memory:/{root}")
            assert files.cat_file(f"{root}/{name}") == content
        assert files.cat_file(f"{root}/wx.bin.part") == b"another's"
        assert not files.exists(f"{root}/{name}.part")
        files.rm(f"/{tmp_path.name}", recursive=True)

    def test_a_store_that_does_not_answer_holds_no_rank_up(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        from fsspec.implementations.memory import MemoryFileSystem

        copying, answers, put = threading.Event(), threading.Event(), MemoryFileSystem.put_file

        def put_file(self: Any, here: str, there: str, **more: Any) -> None:
            if there.endswith("w.bin.part"):
                copying.set()
                assert answers.wait(60)
            put(self, here, there, **more)

        def train(place: str) -> int:
            world = tr.world()
            if world.rank == 0:
                world.store("w.bin", b"weights")
            world.barrier()
            Path(place, f"rank-{world.rank}").touch()
            return world.rank

        def answer() -> None:
            assert copying.wait(60)
            wait(lambda: len(list(tmp_path.glob("rank-*"))) == 2, "both ranks have gone on")
            answers.set()

        monkeypatch.setattr(MemoryFileSystem, "put_file", put_file)
        meanwhile = threading.Thread(target=answer)
        meanwhile.start()
        try:
            assert run(train, args=(str(tmp_path),), run_dir=f"memory://{tmp_path.name}") == [0, 1]
        finally:
            answers.set()
            meanwhile.join()
        assert MemoryFileSystem().cat_file(f"/{tmp_path.name}/w.bin") == b"weights"
        MemoryFileSystem().rm(f"/{tmp_path.name}", recursive=True)

    def test_a_store_that_refuses_a_file_ends_the_run_by_an_error(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from fsspec.implementations.memory import MemoryFileSystem

        put = MemoryFileSystem.put_file

        def put_file(self: Any, here: str, there: str, **more: Any) -> None:
            if there.endswith("w.bin.part"):
                raise PermissionError(errno.EACCES, "no right to write here")
            put(self, here, there, **more)

        monkeypatch.setattr(MemoryFileSystem, "put_file", put_file)
        with pytest.raises(StoreFailed) as caught:
            run(lambda: tr.world().store("w.bin", b"weights"), 1, run_dir="memory://refusing")
        assert str(caught.value).startswith("memory://refusing/w.bin could not be stored: no right to write here.")
        MemoryFileSystem().rm("/refusing", recursive=True)

    @pytest.mark.parametrize("on", ["driver", "here"])
    def test_has_what_ranks_store(self, on: str, tmp_path: Path) -> None:
        def train() -> None:
            tr.world().store(f"weights/{tr.world().rank}.bin", (bytes([k]) * (3 << 20) for k in range(3)))
            tr.world().store("empty", [])

        tr.launch(train, ranks=1, on=on, progress=False, run_dir=str(tmp_path / "run"))
        stored = (tmp_path / "run/weights/0.bin").read_bytes()
        assert stored == b"".join(bytes([k]) * (3 << 20) for k in range(3))
        assert (tmp_path / "run/empty").read_bytes() == b""

    def test_what_a_rank_stored_by_half_is_not_there(self, tmp_path: Path) -> None:
        def train() -> None:
            def chunks() -> Any:
                yield b"first"
                yield b"second"
                raise OSError("the source broke")

            tr.world().store("half.bin", chunks())

        failed(train, 1, run_dir=str(tmp_path / "run"))
        assert not [path for path in (tmp_path / "run").rglob("*") if "half" in path.name]

    @pytest.mark.parametrize("url", [False, True], ids=["disk", "fsspec"])
    def test_what_a_killed_rank_stored_by_half_is_stored_whole_by_the_next_attempt(
        self, url: bool, tmp_path: Path
    ) -> None:
        run_dir = "memory://launch/1" if url else str(tmp_path / "run")

        def train() -> None:
            def chunks() -> Any:
                for number in range(4):
                    if number == 3 and not tmp_path.joinpath("killed").exists():
                        time.sleep(0.5)  # what came before is on its way
                        tmp_path.joinpath("killed").touch()
                        os.kill(os.getpid(), signal.SIGKILL)
                    yield b"%d" % number * (1 << 20)

            tr.world().store("weights.bin", chunks())

        import fsspec

        try:
            run(train, 1, run_dir=run_dir, retries=1)
            with fsspec.open(f"{run_dir}/weights.bin", "rb") as file:
                assert file.read() == b"".join(b"%d" % number * (1 << 20) for number in range(4))
            with fsspec.open(f"{run_dir}/report.json", "rb") as file:
                assert len(json.loads(file.read())["retries"]) == 1
        finally:
            if url:
                fsspec.filesystem("memory").rm("/launch", recursive=True)

    def test_one_that_cant_be_made_is_told_before_anything_starts(self, tmp_path: Path) -> None:
        tmp_path.joinpath("file").touch()
        with pytest.raises(
            BadSetting, match=r"The run directory \S+/file/run can't be used: FileExistsError.* '\S+/file'"
        ):
            run(lambda: None, run_dir=str(tmp_path / "file" / "run"))

    @pytest.mark.parametrize("name", ["../outside", "/tmp/outside", "a/../../outside"])
    def test_nothing_is_stored_outside_of_it(self, name: str, tmp_path: Path) -> None:
        with pytest.raises(TritiumError, match="is no name of a file in the run directory"):
            run(lambda: tr.world().store(name, [b"x"]), 1, run_dir=str(tmp_path / "run"))
        assert not list(tmp_path.rglob("outside"))


DRIVER = """
import os, sys, time, threading
from pathlib import Path
import tritium as tr

def train():
    Path(folder, f"rank-{tr.world().rank}").write_text(str(os.getpid()))
    tr.world().barrier()
    Path(folder, "all").touch()
    time.sleep(600)

folder = sys.argv[1]
try:
    tr.launch(train, ranks=2, on="driver", progress=False)
except KeyboardInterrupt:
    print("interrupted", threading.active_count())
    sys.exit(130)
"""


@pytest.mark.processes
class TestTheDriverEnds:
    def start(self, tmp_path: Path) -> tuple[subprocess.Popen[str], list[int]]:
        driver = subprocess.Popen([sys.executable, "-c", DRIVER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
        try:
            wait(lambda: Path(tmp_path, "all").exists() or driver.poll() is not None, "both ranks run", 60)
        except BaseException:
            driver.kill()
            raise
        return driver, [int(Path(tmp_path, f"rank-{rank}").read_text()) for rank in range(2)]

    def test_by_ctrl_c(self, tmp_path: Path) -> None:
        driver, ranks = self.start(tmp_path)
        driver.send_signal(signal.SIGINT)
        wait(lambda: not any(map(alive, ranks)), "the ranks are gone", SECONDS)
        output, _ = driver.communicate(timeout=30)
        assert (driver.returncode, output) == (130, "interrupted 1\n")  # and no thread is left

    @pytest.mark.parametrize("name", ["SIGKILL", "SIGTERM"])
    def test_by_a_signal(self, name: str, tmp_path: Path) -> None:
        driver, ranks = self.start(tmp_path)
        driver.send_signal(getattr(signal, name))
        wait(lambda: not any(map(alive, ranks)), "the ranks are gone", SECONDS)
        driver.communicate(timeout=30)


@pytest.mark.processes
def test_limits_of_time_may_be_infinite() -> None:
    for_ever = {"start_timeout": math.inf, "stall_timeout": math.inf}
    assert tr.launch(lambda: tr.world().rank, ranks=2, on="driver", progress=False, **for_ever) == [0, 1]


@pytest.mark.processes
def test_two_launches_at_once_know_nothing_of_each_other() -> None:
    results: dict[str, list[Any]] = {}

    def launch(name: str) -> None:
        def train() -> tuple[list[str], str]:
            world = tr.world()
            return [world.gather(name + str(world.rank)) for _ in range(20)][-1], world.run_id

        results[name] = run(train)

    threads = [threading.Thread(target=launch, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [gathered for gathered, _ in results["a"] + results["b"]] == [["a0", "a1"]] * 2 + [["b0", "b1"]] * 2
    assert results["a"][0][1] == results["a"][1][1] != results["b"][0][1]


@pytest.mark.processes
@pytest.mark.parametrize("thread", ["follow_rank", "follow_coordinator"])
def test_an_error_in_a_thread_of_a_supervisor_ends_the_gang(thread: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(*_: Any) -> None:
        raise AttributeError("a message that it does not understand")

    monkeypatch.setattr(f"tritium.gang.supervisor.relay.Relay.{thread}", breaks)
    with pytest.raises(RankFailed, match="a message that it does not understand"):
        run(lambda: None, start_timeout=60)


@pytest.mark.processes
def test_a_gang_that_is_not_complete_in_time_is_ended_and_its_ranks_named() -> None:
    with pytest.raises(StartTimeout, match=r"of 2 ranks were ready after start_timeout=0\.01 s\. Still missing: task"):
        run(lambda: None, start_timeout=0.01)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({}, "missing a required argument: 'rate'. It gets args=, which holds 0, and kwargs=, which holds nothing"),
        ({"args": 5}, r"args=5 must be a list or tuple of arguments, such as args=\(5,\)"),
        ({"args": "ab"}, r"such as args=\('ab',\)"),
        ({"args": (1, 2)}, "too many positional arguments"),
        ({"args": (1,), "kwargs": {"x": 1}}, "unexpected keyword argument 'x'"),
    ],
)
def test_arguments_that_the_function_does_not_take_are_refused(given: dict[str, Any], says: str) -> None:
    def train(rate: float) -> float:
        return rate

    with pytest.raises(BadSetting, match=says):
        run(train, 1, **given)
    assert run(train, 1, args=[0.5]) == [0.5]


def test_the_report_says_what_ended_a_run_in_which_no_rank_failed(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        tr.launch(lambda: 1 / 0, on="here", progress=False, run_dir=str(tmp_path))
    failure = json.loads(tmp_path.joinpath("report.json").read_text())["failure"]
    assert (failure["rank"], failure["type"], failure["text"]) == (None, "ZeroDivisionError", "division by zero")
    assert "test_launch.py" in failure["traceback"]


@pytest.mark.processes
def test_paths_that_python_passes_over_do_not_matter(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path, tmp_path])
    assert run(lambda: 1, 1) == [1]


@pytest.mark.parametrize("env", [{"A=B": "1"}, {"": "1"}, {"A": "1\0"}])
def test_variables_that_no_process_can_have_are_refused(env: dict[str, str]) -> None:
    with pytest.raises(BadSetting, match="a name must not be empty or hold '='"):
        run(lambda: 1, 1, env=env)


OLD_LIBRARY = """
import os
for name in ("memfd_create", "pidfd_open"):
    vars(os).pop(name, None)
"""
PROGRAM = """
import os
import tritium as tr

def remember():
    from multiprocessing.shared_memory import SharedMemory
    SharedMemory(create=True, size=10)  # starts a process that removes it
    assert not {"memfd_create", "pidfd_open"} & set(dir(os))
    return tr.world().rank

if __name__ == "__main__":
    print(tr.launch(remember, ranks=2, on="driver", progress=False, output="none"))
"""


@pytest.mark.processes
def test_in_a_python_that_was_built_for_an_old_c_library(tmp_path: Path) -> None:
    """As Conda's."""
    tmp_path.joinpath("sitecustomize.py").write_text(OLD_LIBRARY)
    tmp_path.joinpath("program.py").write_text(PROGRAM)
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, str(tmp_path / "program.py")]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout, done.returncode) == ("[0, 1]\n", 0), done.stderr


@pytest.mark.processes
def test_an_error_comes_however_slowly_what_was_said_before_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """More is on its way to the driver than a supervisor keeps for sending again, and the rank has left long ago."""
    add = StoredFiles.add

    def slowly(self: StoredFiles, piece: Any) -> None:
        time.sleep(0.25)
        add(self, piece)

    def train() -> None:
        tr.world().store("large", (bytes(4 << 20) for _ in range(24)))
        raise ValueError("the true cause")

    monkeypatch.setattr(StoredFiles, "add", slowly)
    error = failed(train, 1, run_dir=str(tmp_path / "run"))
    assert str(error.__cause__) == "the true cause"
    assert not error.lost


class TestHere:
    def here(self, fn: Callable[..., Any], **settings: Any) -> Any:
        return tr.launch(fn, on="here", progress=False, **settings)

    def test_is_this_process_as_a_world_of_one(self) -> None:
        def train() -> tuple[Any, ...]:
            world = tr.world()
            world.barrier()
            return os.getpid(), world.rank, world.size, world.gather("x"), world.peers[0].pid, world.device

        assert self.here(train) == [(os.getpid(), 0, 1, ["x"], os.getpid(), "cpu")]
        assert tr.world().run_id == ""  # and after it, no longer

    def test_what_the_function_raises_is_raised_as_it_is(self) -> None:
        error = Careless(1, "here")

        def train() -> None:
            raise error

        with pytest.raises(Careless) as caught:
            self.here(train)
        assert caught.value is not None
        assert str(caught.value) == "1: here"

    def test_has_the_environment_of_a_rank_until_it_ends(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("MINE", "before")
        before = dict(os.environ)
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "OMP_NUM_THREADS", "MINE")
        seen = self.here(lambda: [os.environ.get(name) for name in names], env={"MINE": "set"}, cpus=3)
        assert seen == [["0", "1", "0", "1", "127.0.0.1", "3", "set"]]

        def train() -> None:
            raise ValueError(os.environ["MASTER_PORT"])

        with pytest.raises(ValueError, match=r"^\d+$"):
            self.here(train, env={"MINE": "set"})
        assert dict(os.environ) == before

    def test_makes_a_process_group_each_time(self) -> None:
        import torch
        import torch.distributed as dist

        def train() -> tuple[float, int]:
            dist.init_process_group("gloo")
            total = torch.tensor(2.0)
            dist.all_reduce(total)
            return total.item(), torch.get_num_threads()

        threads = torch.get_num_threads()
        assert [self.here(train, cpus=1) for _ in range(2)] == [[(2.0, 1)]] * 2  # no group is left to be in the way
        assert not dist.is_initialized()
        assert torch.get_num_threads() == threads

    def test_imports_py_files_from_where_they_are_until_it_ends(self, tmp_path: Path) -> None:
        Path(tmp_path, "in_a_file.py").write_text("X = 1\n")
        Path(tmp_path, "beside.py").write_text("X = 2\n")
        Path(tmp_path, "in_a_package").mkdir()
        Path(tmp_path, "in_a_package", "__init__.py").write_text("from in_a_package.part import X\n")
        Path(tmp_path, "in_a_package", "part.py").write_text("X = 3\n")
        with zipfile.ZipFile(tmp_path / "in_a.zip", "w") as archive:
            archive.writestr("in_a_zip.py", "X = 4\n")

        def train() -> list[Any]:
            import in_a_file  # type: ignore[import-not-found]
            import in_a_package  # type: ignore[import-not-found]
            import in_a_zip  # type: ignore[import-not-found]

            return [in_a_file.X, in_a_file.__file__, in_a_package.X, in_a_zip.X, importlib.util.find_spec("beside")]

        files = [str(tmp_path / name) for name in ("in_a_file.py", "in_a_package", "in_a.zip")]
        assert self.here(train, py_files=files) == [[1, str(tmp_path / "in_a_file.py"), 3, 4, None]]
        Path(tmp_path, "in_a_file.py").write_text("X = 10\n\n")
        assert self.here(train, py_files=files)[0][0] == 10
        assert not [name for name in sys.modules if name.startswith("in_a_")]
        assert str(tmp_path / "in_a.zip") not in sys.path
        with pytest.raises(BadSetting, match="is no Python file, package directory or zip"):
            self.here(train, py_files=[str(tmp_path / "none.py")])

    def test_logs_and_shows_as_elsewhere(self, tmp_path: Path) -> None:
        self.here(lambda: tr.world().log(loss=0.5), run_dir=str(tmp_path / "run"))
        assert '"loss": 0.5' in (tmp_path / "run/events.jsonl").read_text()


@pytest.mark.processes
@pytest.mark.parametrize(("on", "ranks"), [("driver", 2), ("here", 1)])
def test_tables_are_dealt_row_by_row(on: str, ranks: int) -> None:
    import pandas as pd

    def train() -> list[float]:
        return [
            float(x)
            for epoch in tr.world().shard("train").epochs(1, batch_size=4)
            for batch in epoch
            for x in batch["x"][: batch.rows]
        ]

    frame = pd.DataFrame({"x": np.arange(11.0)})
    seen = tr.launch(train, ranks=ranks, on=on, data={"train": frame}, progress=False)
    assert sorted(x for rows in seen for x in rows) == list(np.arange(11.0))
    assert all(seen)

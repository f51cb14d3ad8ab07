"""MPI programs in a gang: mpi4py and compiled ones, and what happens when a rank aborts, dies or takes no part."""

from __future__ import annotations

import glob
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import tritium as tr
from machines import can_make_hosts, run_on_hosts
from tritium.errors import BadSetting, RankFailed, TritiumError
from tritium.frameworks.mpi import MPI
from tritium.gang.driver.recorder import Recorder
from tritium.gang.supervisor.pmi import process_mapping

pytestmark = pytest.mark.skipif(find_spec("mpi4py") is None, reason="needs mpi4py: pip install tritium[mpi]")
MPICC = Path(sys.executable).with_name("mpicc")


def run(fn: Any, ranks: int = 3, **settings: Any) -> list[Any]:
    quiet = {"on": "driver", "progress": False, "output": "none", "retries": 0, "framework": "mpi"}
    return tr.launch(fn, ranks=ranks, **{**quiet, **settings})


@pytest.fixture(autouse=True)
def _no_shared_memory_is_left() -> Any:
    before = set(glob.glob("/dev/shm/mpich_*"))
    yield
    left, deadline = set(glob.glob("/dev/shm/mpich_*")) - before, time.monotonic() + 20
    while left and time.monotonic() < deadline:  # that of a program of another test process goes when that has ended
        time.sleep(0.1)
        left &= set(glob.glob("/dev/shm/mpich_*"))
    assert not left


def test_communicators_are_split() -> None:
    def train() -> tuple[int, int, int]:
        from mpi4py import MPI

        world = MPI.COMM_WORLD
        half, host = world.Split(world.rank % 2), world.Split_type(MPI.COMM_TYPE_SHARED)
        return half.size, half.allreduce(world.rank), host.size

    assert run(train, 4) == [(2, 2, 4), (2, 4, 4), (2, 2, 4), (2, 4, 4)]


def test_the_ranks_of_mpi_are_those_of_the_gang_and_rows_come_beside_it() -> None:
    import pandas as pd

    def train() -> tuple[int, int, float]:
        from mpi4py import MPI

        world = tr.world()
        assert (MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size) == (world.rank, world.size)
        (epoch,) = world.shard("train").epochs(1, batch_size=4)
        mine = sum(float(batch["x"][: batch.rows].sum()) for batch in epoch)
        world.barrier()
        return world.rank, world.size, MPI.COMM_WORLD.allreduce(mine)

    data = {"train": pd.DataFrame({"x": range(30)})}
    assert run(train, data=data) == [(0, 3, 435.0), (1, 3, 435.0), (2, 3, 435.0)]


def test_one_rank_and_no_use_of_mpi_are_fine() -> None:
    def alone() -> int:
        from mpi4py import MPI

        return int(MPI.COMM_WORLD.size)

    assert run(alone, 1) == [1]
    assert run(lambda: tr.world().rank, 2) == [0, 1]


def test_abort_ends_the_gang_with_its_code() -> None:
    def train() -> None:
        from mpi4py import MPI

        if MPI.COMM_WORLD.rank == 1:
            MPI.COMM_WORLD.Abort(5)
        MPI.COMM_WORLD.barrier()

    with pytest.raises(RankFailed, match=r"Rank 1 .* left: it called MPI_Abort\(5\)") as caught:
        run(train)
    assert (caught.value.rank, caught.value.exit_code) == (1, 5)


@pytest.mark.parametrize("end", ["killed", "raises"])
def test_a_rank_that_ends_while_others_are_in_a_collective_is_named(end: str) -> None:
    def train() -> None:
        from mpi4py import MPI

        MPI.COMM_WORLD.barrier()
        if MPI.COMM_WORLD.rank == 1 and end == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if MPI.COMM_WORLD.rank == 1:
            raise ValueError("the user's own")
        MPI.COMM_WORLD.allreduce(1)

    with pytest.raises(RankFailed) as caught:
        run(train)
    assert caught.value.rank == 1
    assert (caught.value.signal == "SIGKILL") if end == "killed" else isinstance(caught.value.__cause__, ValueError)


def test_a_rank_that_returns_without_the_others_mpi_init_is_named() -> None:
    def train() -> int:
        if tr.world().rank == 1:
            return 0
        from mpi4py import MPI

        return int(MPI.COMM_WORLD.size)

    with pytest.raises(TritiumError, match=r"rank 1 has returned and will never reach MPI_Init\(\), where rank"):
        run(train)


def test_what_is_not_there_says_so_by_its_mpi_error() -> None:
    def train() -> None:
        from mpi4py import MPI

        MPI.COMM_SELF.Spawn(sys.executable, ["-c", "1"], 1)

    with pytest.raises(RankFailed, match="MPI_Comm_spawn"):
        run(train, 2)


def test_another_framework_or_none_is_refused_with_the_setting_to_use() -> None:
    def train() -> None:
        from mpi4py import MPI

        MPI.COMM_WORLD.barrier()

    for framework in (None, "torch"):
        with pytest.raises(BadSetting, match='framework="mpi"'):
            run(train, framework=framework)
    with pytest.raises(BadSetting, match="a gang has one framework"):
        run(train, framework=["torch", "mpi"])
    with pytest.raises(BadSetting, match=r"'mpi4py' is unknown. Did you mean 'mpi'\?"):
        run(train, framework="mpi4py")
    with pytest.raises(BadSetting, match=r"is a class; write framework=MPI\(\)"):
        run(train, framework=MPI)


PROGRAM = r"""
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
int main(int argc, char** argv) {
  int rank, size, sum;
  MPI_Init(&argc, &argv);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  MPI_Allreduce(&rank, &sum, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
  printf("rank %d of %d: sum %d, %s\n", rank, size, sum, argc > 1 ? argv[1] : "");
  fflush(stdout);
  if (argc > 1 && rank == 1 && !strcmp(argv[1], "abort")) MPI_Abort(MPI_COMM_WORLD, 7);
  if (argc > 1 && rank == 1 && !strcmp(argv[1], "crash")) *(volatile int*)0 = 1;
  MPI_Barrier(MPI_COMM_WORLD);
  MPI_Finalize();
  return argc > 1 && rank == 1 && !strcmp(argv[1], "fail") ? 3 : 0;
}
"""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> str:
    if shutil.which("cc") is None or not MPICC.exists():
        pytest.skip("needs a C compiler and mpicc")
    folder = tmp_path_factory.mktemp("compiled")
    source = folder / "sum.c"
    source.write_text(PROGRAM)
    # mpicc only adds these to the compiler's words, and calls the one that the wheel was built with.
    prefix = MPICC.parents[1]
    words = [f"-I{prefix}/include", f"-L{prefix}/lib", f"-Wl,-rpath,{prefix}/lib", "-lmpi"]
    subprocess.run(["cc", "-o", str(folder / "sum"), str(source), *words], check=True)
    return str(folder / "sum")


def test_a_compiled_program_is_the_gang(compiled: str, tmp_path: Path) -> None:
    assert run(compiled, args=["hello"], run_dir=str(tmp_path / "run")) == [None, None, None]
    logs = [(tmp_path / "run" / "logs" / f"rank-{rank}.log").read_text() for rank in range(3)]
    assert [f"rank {rank} of 3: sum 3, hello" in log for rank, log in enumerate(logs)] == [True, True, True]


@pytest.mark.parametrize(
    ("word", "message", "code"),
    [("fail", r"sys.exit\(3\)", 3), ("abort", r"MPI_Abort\(7\)", 7), ("crash", "killed by SIGSEGV", -11)],
)
def test_the_end_of_a_compiled_program_is_that_of_its_rank(compiled: str, word: str, message: str, code: int) -> None:
    with pytest.raises(RankFailed, match=message) as caught:
        run(compiled, args=[word])
    assert (caught.value.rank, caught.value.exit_code) == (1, code)


def test_a_program_that_is_not_on_the_executors_comes_with_the_launch(compiled: str) -> None:
    program = Path(compiled).with_name("moved")
    shutil.copy(compiled, program)

    def take_away(observed: Callable[..., Any]) -> Callable[..., Any]:
        def then(*args: Any, **kwargs: Any) -> Any:
            program.unlink(missing_ok=True)
            return observed(*args, **kwargs)

        return then

    with pytest.MonkeyPatch.context() as patch:  # it is gone when the first event is written, before any rank starts
        patch.setattr(Recorder, "open", take_away(Recorder.open))
        assert run(str(program), 2) == [None, None]
    assert not program.exists()


def across(place: str) -> None:
    """Write what MPI says of the ranks into `place/RANK`."""
    from mpi4py import MPI

    ranks = MPI.COMM_WORLD
    host = ranks.Split_type(MPI.COMM_TYPE_SHARED)
    Path(place, str(ranks.rank)).write_text(f"{ranks.size} {ranks.allreduce(ranks.rank)} {host.size}")


@pytest.mark.skipif(not can_make_hosts(), reason="only root may make network namespaces")
def test_ranks_on_two_hosts_form_one_world(tmp_path: Path) -> None:
    run_on_hosts(across, str(tmp_path), framework=MPI())
    assert [tmp_path.joinpath(str(rank)).read_text() for rank in range(2)] == ["2 1 1", "2 1 1"]


def test_the_mapping_of_ranks_to_hosts() -> None:
    assert process_mapping(["a", "a", "b", "b"]) == "(vector,(0,2,2))"
    assert process_mapping(["a", "b", "b"]) == "(vector,(0,1,1),(1,1,2))"
    assert process_mapping(["a"]) == "(vector,(0,1,1))"

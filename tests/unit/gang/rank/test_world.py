"""`tritium.world()` without a launch by Tritium: a plain process, torchrun and mpirun."""

from __future__ import annotations

import importlib.util
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import tritium as tr
from tritium.errors import TritiumError
from tritium.gang.rank.world import outside

PROGRAM = """
import os
import tritium as tr

world = tr.world()
told = world.gather({"rank": world.rank, "pid": os.getpid()})
world.barrier()
assert [t["rank"] for t in told] == list(range(world.size)), told
assert told[world.rank]["pid"] == os.getpid()
with open(f"{os.environ['TMPDIR']}/said-{world.rank}", "w") as file:  # lines of two ranks may mix on one stdout
    file.write(f"rank {world.rank} of {world.size}, local {world.local_rank} of {world.local_size}")
"""
BOTH = ["rank 0 of 2, local 0 of 2", "rank 1 of 2, local 1 of 2"]


def said_by(command: list[str], scratch: Path) -> list[str]:
    """Return what the ranks of a finished command wrote, in rank order."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(scratch)}  # torchrun leaves a directory there
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=env)
    assert done.returncode == 0, done.stderr
    return [path.read_text() for path in sorted(scratch.glob("said-*"))]


class TestAPlainProcess:
    def test_is_a_world_of_one(self) -> None:
        world = tr.world()
        assert (world.rank, world.size, world.local_rank, world.local_size) == (0, 1, 0, 1)
        assert (world.host, world.run_id) == (socket.gethostname(), "")
        assert [(peer.rank, peer.pid) for peer in world.peers] == [(0, os.getpid())]
        assert world.gather("x") == ["x"]
        world.barrier()

    def test_logs_a_plain_line(self, capsys: pytest.CaptureFixture[str]) -> None:
        tr.world().log(step=3, loss=0.25)
        assert capsys.readouterr().out == "step=3 loss=0.25\n"

    def test_has_no_run_to_store_in_and_no_shards(self) -> None:
        with pytest.raises(TritiumError, match=r"no run to store 'w\.bin' in"):
            tr.world().store("w.bin", [b""])
        with pytest.raises(TritiumError, match=r"no shard 'train'.*tritium\.launch\(…, data="):
            tr.world().shard("train")

    def test_imports_no_torch_for_it(self, tmp_path: Path) -> None:
        program = PROGRAM + "import sys\nassert 'torch' not in sys.modules\n"
        assert said_by([sys.executable, "-c", program], tmp_path) == ["rank 0 of 1, local 0 of 1"]


class TestTorchrun:
    @pytest.mark.processes
    def test_two_ranks(self, tmp_path: Path) -> None:
        script = tmp_path / "train.py"
        group = "import torch.distributed as dist\ndist.init_process_group('gloo')\n"
        script.write_text(group + PROGRAM + "dist.destroy_process_group()\n")
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
        assert said_by(command, tmp_path) == BOTH

    def test_says_what_gather_needs_there(self) -> None:
        world = outside({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"})
        assert (world.rank, world.size, world.local_rank) == (1, 2, 0)
        with pytest.raises(TritiumError, match=r"init_process_group\(\) first"):
            world.barrier()


class TestMpirun:
    @pytest.mark.skipif(importlib.util.find_spec("mpi4py") is None, reason="needs mpi4py: pip install tritium[mpi]")
    def test_two_ranks_of_mpich(self, tmp_path: Path) -> None:
        mpirun = shutil.which("mpirun", path=os.path.dirname(sys.executable)) or shutil.which("mpirun")
        if mpirun is None:
            pytest.skip("needs mpirun: pip install tritium[mpi]")
        script = tmp_path / "train.py"
        script.write_text(PROGRAM)
        assert said_by([mpirun, "-n", "2", sys.executable, str(script)], tmp_path) == BOTH

    def test_open_mpis_variables(self) -> None:
        names = {"RANK": "3", "SIZE": "4", "LOCAL_RANK": "1", "LOCAL_SIZE": "2"}
        world = outside({f"OMPI_COMM_WORLD_{name}": value for name, value in names.items()})
        assert (world.rank, world.size, world.local_rank, world.local_size) == (3, 4, 1, 2)

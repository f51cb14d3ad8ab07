"""Horovod in a gang: its ranks, scripts for horovodrun, two hosts, and what happens when a rank dies or is missing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import tritium as tr
from machines import can_make_hosts, run_on_hosts
from tritium.errors import BadSetting, RankFailed, Stalled, TritiumError
from tritium.frameworks.horovod import Horovod

pytestmark = pytest.mark.skipif(find_spec("horovod") is None, reason="horovod is not installed: make horovod")

SCRIPT = """
import argparse, json, pathlib
import torch
import horovod.torch as hvd

parser = argparse.ArgumentParser()
parser.add_argument("--out", required=True)
args = parser.parse_args()
hvd.init()
total = hvd.allreduce(torch.ones(1) * hvd.rank(), op=hvd.Sum).item()
pathlib.Path(args.out, str(hvd.rank())).write_text(json.dumps([hvd.size(), hvd.local_rank(), total]))
"""


def run(fn: Any, ranks: int = 2, **settings: Any) -> list[Any]:
    quiet = {"on": "driver", "progress": False, "output": "none", "retries": 0, "framework": "horovod"}
    return tr.launch(fn, ranks=ranks, **{**quiet, **settings})


def numbers() -> list[int]:
    import horovod.torch as hvd  # type: ignore[import-not-found]

    hvd.init()
    return [hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size()]


def test_the_ranks_of_horovod_are_those_of_the_gang_and_rows_come_beside_it() -> None:
    import pandas as pd

    def train() -> tuple[list[int], float]:
        import horovod.torch as hvd
        import torch

        found = numbers()
        mine = 0.0
        for batch in next(iter(tr.world().shard("train").epochs(1, batch_size=4))):
            assert isinstance(batch["x"], torch.Tensor)
            assert batch["x"].dtype == torch.float32
            mine += float(batch["x"][: batch.rows].sum())
        return found, hvd.allreduce(torch.tensor(mine), op=hvd.Sum).item()

    data = {"train": pd.DataFrame({"x": [float(n) for n in range(30)]})}
    assert run(train, 3, data=data) == [([rank, 3, rank, 3, 0, 1], 435.0) for rank in range(3)]


def test_outside_a_gang_and_in_a_gang_of_one_it_is_alone() -> None:
    program = "import horovod.torch as hvd; hvd.init(); print(hvd.size(), hvd.rank())"
    plain = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert plain.stdout == "1 0\n"
    assert run(numbers, 1) == [[0, 1, 0, 1, 0, 1]]


def test_here_leaves_no_variable_behind() -> None:
    program = """
import os
import tritium as tr
from frameworks.test_horovod import numbers
print(tr.launch(numbers, ranks=1, on="here", framework="horovod", progress=False))
print([name for name in os.environ if "HOROVOD" in name])
"""
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    plain = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True)
    assert plain.stdout == "[[0, 1, 0, 1, 0, 1]]\n[]\n"


def test_process_sets_and_a_second_init() -> None:
    def train() -> list[float]:
        import horovod.torch as hvd
        import torch

        ends, sums = hvd.ProcessSet([0, 2]), []
        hvd.init(process_sets=[ends])
        if ends.included():
            sums.append(hvd.allreduce(torch.ones(1) * hvd.rank(), op=hvd.Sum, process_set=ends).item())
        hvd.barrier()  # a rank that shuts Horovod down ends the collectives of all
        for _ in range(2):
            hvd.shutdown()
            hvd.init()
            sums.append(hvd.allreduce(torch.ones(1) * hvd.rank(), op=hvd.Sum).item())
        return sums

    assert run(train, 3) == [[2, 3, 3], [3, 3], [2, 3, 3]]


def test_a_script_for_horovodrun_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    assert run(path, args=["--out", str(tmp_path)]) == [None, None]
    assert [json.loads(tmp_path.joinpath(str(rank)).read_text()) for rank in range(2)] == [[2, 0, 1.0], [2, 1, 1.0]]
    words = ["run", "--framework", "horovod", "--ranks", "3", str(path), "--out", str(tmp_path)]
    command = [sys.executable, "-c", "import tritium.cli; tritium.cli.main()", *words]
    shell = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert shell.returncode == 0, shell.stdout + shell.stderr
    assert [json.loads(tmp_path.joinpath(str(rank)).read_text()) for rank in range(3)] == [
        [3, rank, 3.0] for rank in range(3)
    ]


@pytest.mark.parametrize("end", ["killed", "raises"])
def test_a_rank_that_ends_while_others_are_in_a_collective_is_named(end: str) -> None:
    def train() -> None:
        import horovod.torch as hvd
        import torch

        hvd.init()
        hvd.allreduce(torch.ones(1))
        if hvd.rank() == 1 and end == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if hvd.rank() == 1:
            raise ValueError("the user's own")
        hvd.allreduce(torch.ones(1))

    with pytest.raises(RankFailed) as caught:
        run(train, 3)
    assert caught.value.rank == 1
    assert (caught.value.signal == "SIGKILL") if end == "killed" else isinstance(caught.value.__cause__, ValueError)


def test_a_rank_that_returns_while_others_are_in_a_collective_ends_it_as_under_horovodrun() -> None:
    def train() -> None:
        import horovod.torch as hvd
        import torch

        hvd.init()
        if hvd.rank() == 0:
            hvd.allreduce(torch.ones(1))

    with pytest.raises(RankFailed, match="after one of the ranks finished execution") as caught:
        run(train)
    assert caught.value.rank == 0


def test_a_rank_that_has_returned_does_not_end_the_store_that_others_still_need() -> None:
    def train() -> str:
        import horovod.torch as hvd

        world = tr.world()
        if world.rank == 0:
            return ""
        with pytest.raises(TritiumError) as caught:
            world.barrier()
        for name in ("", "LOCAL_", "CROSS_"):  # alone, and yet through the store of rank 0
            os.environ.update({f"HOROVOD_{name}RANK": "0", f"HOROVOD_{name}SIZE": "1"})
        os.environ["WORLD_SIZE"] = "1"
        hvd.init()
        assert hvd.size() == 1
        return str(caught.value)

    assert "rank 0 has" in run(train)[1]


def test_a_rank_that_never_comes_to_init_is_named() -> None:
    def train() -> None:
        import horovod.torch as hvd

        if tr.world().rank == 0:
            hvd.init()

    with pytest.raises(Stalled, match=r"its function has returned\. It never reached the init in which rank 0 waits"):
        run(train, stall_timeout=4)


def test_ranks_that_horovod_does_not_connect_are_an_error() -> None:
    def train() -> None:
        import horovod.torch as hvd

        for name in [name for name in os.environ if name.startswith("HOROVOD_")]:
            del os.environ[name]
        hvd.init()

    with pytest.raises(BadSetting, match=r"formed a world of 1, and this gang has 2 ranks"):
        run(train)


def test_a_trace_tells_the_exchange_of_gradients_from_the_optimizer(tmp_path: Path) -> None:
    import pandas as pd

    def train() -> None:
        import horovod.torch as hvd
        import torch

        hvd.init()
        model = torch.nn.Linear(1, 1)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.01), named_parameters=model.named_parameters()
        )
        for batch in next(iter(tr.world().shard("train").epochs(1, batch_size=10))):
            optimizer.zero_grad()
            model(batch["x"][:, None]).sum().backward()
            optimizer.step()

    data = {"train": pd.DataFrame({"x": [float(n) for n in range(400)]})}
    run(train, data=data, trace=True, run_dir=str(tmp_path / "run"))
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    found = [event["seconds"] for event in events if event["kind"] == "trace"]
    assert len(found) == 2
    for seconds in found:
        assert seconds["communicate"] > seconds["optimizer"] > 0
        assert min(seconds["forward"], seconds["backward"]) > 0


def test_ranks_that_disagree_are_not_tried_again() -> None:
    def train() -> None:
        import horovod.torch as hvd
        import torch

        hvd.init()
        hvd.allreduce(torch.ones(hvd.rank() + 1), name="gradient")

    with pytest.raises(TritiumError, match="Mismatched ALLREDUCE tensor shapes") as caught:
        run(train, retries=1)
    assert "attempt" not in str(caught.value)


def test_the_assignment_is_that_of_horovodrun() -> None:
    from types import SimpleNamespace

    from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts  # type: ignore[import-not-found]

    from tritium.frameworks.horovod import variables

    for layout in ("a:2,b:1,c:3", "a:1", "a:4,b:4", "a:1,b:3"):
        theirs = get_host_assignments(parse_hosts(layout), 1)
        peers = [SimpleNamespace(host=slot.hostname, local_rank=slot.local_rank) for slot in theirs]
        for slot in theirs:
            place = SimpleNamespace(rank=slot.rank, size=len(theirs), local_rank=slot.local_rank, peers=peers)
            place.local_size, place.host = slot.local_size, slot.hostname
            ours = variables(place)  # type: ignore[arg-type]
            for name in ("rank", "size", "local_rank", "local_size", "cross_rank", "cross_size", "hostname"):
                assert ours[f"HOROVOD_{name.upper()}"] == str(getattr(slot, name)), (layout, slot)


def across(place: str) -> None:
    """Write Horovod's numbers and a sum over the ranks into `place/RANK`."""
    import horovod.torch as hvd
    import torch

    found = numbers()
    Path(place, str(found[0])).write_text(json.dumps([*found, hvd.allreduce(torch.ones(1), op=hvd.Sum).item()]))


@pytest.mark.skipif(not can_make_hosts(), reason="only root may make network namespaces")
def test_ranks_on_two_hosts_form_one_world(tmp_path: Path) -> None:
    run_on_hosts(across, str(tmp_path), framework=Horovod(), each=2, known="{address} {name}")
    found = [json.loads(tmp_path.joinpath(str(rank)).read_text()) for rank in range(4)]
    assert found == [[0, 4, 0, 2, 0, 2, 4], [1, 4, 1, 2, 0, 2, 4], [2, 4, 0, 2, 1, 2, 4], [3, 4, 1, 2, 1, 2, 4]]


@pytest.mark.skipif(not can_make_hosts(), reason="only root may make network namespaces")
@pytest.mark.parametrize(
    ("known", "found"), [("127.0.1.1 {name}", r"127\.0\.1\.1"), ("127.0.0.1 localhost", "nothing")]
)
def test_a_host_whose_name_leads_nowhere_is_an_error(tmp_path: Path, known: str, found: str) -> None:
    text = rf"the host of rank 0, the name tritium-\S+ resolves to {found}.* Let it resolve to 10\."
    with pytest.raises(BadSetting, match=text):
        run_on_hosts(across, str(tmp_path), framework=Horovod(), known=known)

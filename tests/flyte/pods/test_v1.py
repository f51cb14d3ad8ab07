"""flytekit's tasks: in one process, and by the commands of their pods: spark-submit, and mpirun of two MPIs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import advice
import pods
from workflows import FOLDER, SECONDS, Place

ROOT = FOLDER.parents[1]
OPEN_MPI = ROOT / ".envs" / "openmpi"
BIN = Path(sys.executable).parent
BASICS = FOLDER / "basics_v1.py"
ROSSMANN = ROOT / "examples" / "flyte" / "rossmann_v1.py"
IDS = {
    "FLYTE_INTERNAL_EXECUTION_PROJECT": "p",
    "FLYTE_INTERNAL_EXECUTION_DOMAIN": "d",
    "FLYTE_INTERNAL_EXECUTION_ID": "e",  # Else its log is one for a terminal, and Open MPI's has no columns.
    "FLYTE_INTERNAL_TASK_NAME": "t",
}
pytestmark = pytest.mark.timeout(1800)


def wire(place: Place, *what: str) -> str:
    """Return what wire_v1.py prints."""
    command = [sys.executable, str(FOLDER / "wire_v1.py"), *what]
    done = subprocess.run(
        command,
        env=place.environment(),
        cwd=place.folder / "cwd",
        capture_output=True,
        text=True,
        check=False,
        timeout=SECONDS,
    )
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
    return done.stdout


@dataclass
class Ended:
    """What a pod has left."""

    code: int
    log: str
    outputs: dict[str, Any] | None
    error: dict[str, str] | None


class Pod:
    """The command that a backend runs for a task. `args` and `conf` are those of the task's template."""

    def __init__(self, place: Place, flow: Path, name: str, *inputs: str) -> None:
        self.place, self.folder = place, place.folder / name
        (self.folder / "out").mkdir(parents=True)
        template = json.loads(wire(place, "write", str(flow), name, str(self.folder), *inputs).splitlines()[-1])
        self.args: list[str] = template["args"]
        self.conf: dict[str, str] = template["conf"]
        self.main: str = template["main"]
        self.environment = place.environment(
            **IDS,
            PATH=f"{BIN}{os.pathsep}{os.environ['PATH']}",  # The command begins with mpirun, or python.
            PYTHONPATH=os.pathsep.join([str(flow.parent), place.environment()["PYTHONPATH"]]),
        )

    def by_spark(self) -> Ended:
        """Run the task as Spark's operator does."""
        from pyspark.find_spark_home import _find_spark_home

        conf = [text for pair in self.conf.items() for text in ("--conf", "=".join(pair))]
        submit = [f"{_find_spark_home()}/bin/spark-submit", "--master", "local[3]", *conf]
        return self._run([*submit, self.main.removeprefix("local://"), *self.args])

    def by_open_mpi(self) -> Ended:
        """Run the task's own command, as the launcher of a MPIJob does."""
        self.use_library_of_open_mpi()
        self.environment |= {
            "PATH": f"{OPEN_MPI / 'bin'}{os.pathsep}{self.environment['PATH']}",
            "OMPI_MCA_rmaps_base_oversubscribe": "1",  # A machine may have one core.
        }
        return self._run(self.args)

    def by_mpich(self) -> Ended:
        """Run what the task's command runs, by MPICH, which does not know the options of Open MPI."""
        return self._run(["mpirun", *self.args[self.args.index("-np") :]])

    def use_library_of_open_mpi(self) -> None:
        """Have mpi4py use Open MPI."""
        if not OPEN_MPI.exists():
            pytest.skip("needs Open MPI 4: scripts/openmpi.sh")
        self.environment |= {
            "OPAL_PREFIX": str(OPEN_MPI),
            "LD_LIBRARY_PATH": str(OPEN_MPI / "lib"),
            "MPI4PY_LIBMPI": str(OPEN_MPI / "lib" / "libmpi.so.40"),
        }

    def _run(self, command: list[str]) -> Ended:
        process = pods.start(command, self.environment, self.place.folder / "cwd")
        log = pods.finish(process)
        answer = json.loads(wire(self.place, "read", str(self.folder / "out")).splitlines()[-1])
        return Ended(process.returncode, log, answer["outputs"], answer["error"])


def fate(ended: Ended) -> tuple[str, str]:
    assert ended.outputs is None, ended.log[-3000:]
    assert ended.error is not None, ended.log[-6000:]
    return ended.error["kind"], ended.error["message"]


def test_a_gang_in_this_process(tmp_path: Path) -> None:
    """It has its three slots, however few cores there are, and its ranks need no flytekit."""
    text = wire(Place(tmp_path), "play", str(BASICS), "whole(count=10)")
    answers = [json.loads(line.partition("ANSWER ")[2]) for line in text.splitlines() if "ANSWER " in line]
    assert answers == [{"sum": 90.0, "ranks": 3.0}]


def test_the_code_of_the_page(tmp_path: Path) -> None:
    flow = tmp_path / "page.py"
    flow.write_text("\n\n".join(code for _, code in advice.blocks(ROOT / "docs" / "flyte-v1.md", "python")))
    text = wire(Place(tmp_path), "play", str(flow), "whole(count=100)")
    assert json.loads(text.splitlines()[-1].removeprefix("ANSWER ")) == pytest.approx(0.99**2, rel=1e-6)


@pytest.mark.parametrize(
    ("name", "kind", "text"),
    [
        ("divides", "NON_RECOVERABLE", "ZeroDivisionError: division by zero"),
        ("loses_a_rank", "RECOVERABLE", "RankFailed: Rank 1 on "),
        ("is_cut_off", "RECOVERABLE", "ConnectionResetError: the store does not answer"),
    ],
)
def test_errors_of_spark_tasks_by_their_class(tmp_path: Path, name: str, kind: str, text: str) -> None:
    written, message = fate(Pod(Place(tmp_path), BASICS, name).by_spark())
    assert written == kind
    assert text in message


@pytest.mark.parametrize("mpi", [Pod.by_open_mpi, Pod.by_mpich])
def test_ranks_of_mpirun_meet(tmp_path: Path, mpi: Any) -> None:
    """Each knows itself and the others, process group and Horovod sum over both, rank 0 alone writes."""
    ended = mpi(Pod(Place(tmp_path), BASICS, "meets", f"folder={str(tmp_path)!r}"))
    assert (ended.code, ended.error) == (0, None), ended.log[-6000:]
    assert ended.outputs is not None, ended.log[-6000:]
    facts = {name: _numbers(value) for name, value in ended.outputs["o0"]["map"]["literals"].items()}
    assert len(set(facts.pop("pids"))) == 2
    assert facts == {"peers": [0, 1], "sums": [3, 3]}
    assert [(tmp_path / rank).read_text() for rank in "01"] == ["0 2 0 0 2", "1 2 1 1 2"]
    assert "IgnoreOutputs" in ended.log


def _numbers(literal: dict[str, Any]) -> list[int]:
    return [int(value["scalar"]["primitive"]["integer"]) for value in literal["collection"]["literals"]]


@pytest.mark.parametrize(("how", "kind"), [("value", "NON_RECOVERABLE"), ("store", "RECOVERABLE")])
def test_the_error_of_the_rank_that_failed_first(tmp_path: Path, how: str, kind: str) -> None:
    """Not that of its peer, which loses its connection; exit code 0, with which a backend reads the error."""
    ended = Pod(Place(tmp_path), BASICS, "fails_alone", f"how={how!r}").by_open_mpi()
    written, message = fate(ended)
    assert (written, ended.code) == (kind, 0)
    assert "rank 1 has its reasons" in message


def test_another_mpi_than_that_of_mpirun(tmp_path: Path) -> None:
    """Each rank would be a world of one: an error names what to do."""
    pod = Pod(Place(tmp_path), BASICS, "meets", f"folder={str(tmp_path)!r}")
    pod.use_library_of_open_mpi()
    assert "mpirun has started 2 ranks, and MPI.COMM_WORLD of mpi4py has 1" in fate(pod.by_mpich())[1]


def test_rossmann_in_this_process(tmp_path: Path) -> None:
    """Spark, horovod.spark's estimator and horovod.torch; the second time all comes from the cache."""
    place = Place(tmp_path)
    (tmp_path / "work").mkdir()
    hyper = "Hyperparameters(epochs=2, hidden=[16], learning_rate=0.002)"
    call = f"rossmann(stores=6, days=420, hp={hyper}, work_dir=FlyteDirectory({str(tmp_path / 'work')!r}))"
    expression = f"(lambda folder, error: [sorted(os.listdir(folder.path)), error])(*{call})"
    (names, error), *_ = [
        json.loads(line.partition("ANSWER ")[2])
        for line in wire(place, "play", str(ROSSMANN), expression).splitlines()
        if line.startswith("ANSWER ")
    ]
    assert {"model.keras", "submission.csv"} <= set(names)
    assert 0 < error < 2
    again = wire(place, "play", str(ROSSMANN), f"[{expression}, pyspark.SparkContext._gateway is None]")
    assert json.loads(again.splitlines()[-1].removeprefix("ANSWER ")) == [[names, error], True]


def test_rossmanns_mpi_task(tmp_path: Path) -> None:
    """Two ranks of mpirun train one network by horovod.torch."""
    frame = "pd.DataFrame({name: [i % 7 for i in range(300)] for name in CATEGORICAL + CONTINUOUS})"
    rows = f"{frame}.assign(Sales=lambda f: 8.0 + f['Promo'] / 10, Validation=lambda f: f.index % 5 == 0)"
    hyper = "Hyperparameters(epochs=20, learning_rate=0.01)"
    ended = Pod(Place(tmp_path), ROSSMANN, "mpi_task", f"rows={rows}", f"hp={hyper}").by_open_mpi()
    assert ended.outputs is not None, f"{ended.error}\n{ended.log[-6000:]}"
    assert 0 < ended.outputs["o0"]["scalar"]["primitive"]["floatValue"] < 0.1

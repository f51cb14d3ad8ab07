"""Scripts, modules and programs in the ranks of a gang, by `launch` and by `tritium run`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

import tritium as tr
from tritium.errors import BadSetting, RankFailed, TritiumWarning

TORCHRUN = """
import argparse, json, os, pathlib, sys
import torch, torch.distributed as dist

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, required=True)
parser.add_argument("--out", required=True)
args = parser.parse_args()

def main():
    dist.init_process_group("gloo")
    total = torch.ones(1) * dist.get_rank()
    dist.all_reduce(total)
    found = {"name": __name__, "lr": args.lr, "sum": total.item(), "size": int(os.environ["WORLD_SIZE"])}
    pathlib.Path(args.out, str(dist.get_rank())).write_text(json.dumps(found))
    dist.destroy_process_group()

if __name__ == "__main__":
    main()
"""


def run(program: Any, *args: str, **settings: Any) -> list[Any]:
    quiet = {"ranks": 2, "on": "driver", "progress": False, "output": "none", "retries": 0}
    return tr.launch(program, args=list(args), **{**quiet, **settings})


def command(*words: str, cwd: Path | None = None, **environment: str) -> subprocess.Popen[str]:
    """Start `tritium run`."""
    return subprocess.Popen(
        [str(Path(sys.executable).with_name("tritium")), "run", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=cwd,
        env={**os.environ, **environment},
    )


def found(place: Path) -> list[dict[str, Any]]:
    return [json.loads(place.joinpath(str(rank)).read_text()) for rank in range(2)]


def script(place: Path, text: str, name: str = "train.py") -> Path:
    path = place / name
    path.write_text(text)
    return path


def test_a_script_for_torchrun_as_it_is(tmp_path: Path) -> None:
    path = script(tmp_path, TORCHRUN)
    assert run(path, "--lr", "0.1", "--out", str(tmp_path)) == [None, None]
    assert found(tmp_path) == [{"name": "__main__", "lr": 0.1, "sum": 1.0, "size": 2}] * 2


def test_from_a_shell(tmp_path: Path) -> None:
    path = script(tmp_path, TORCHRUN)
    with command("--ranks", "2", str(path), "--lr", "0.1", "--out", str(tmp_path)) as process:
        text = process.communicate(timeout=60)[0]
    assert process.returncode == 0, text
    assert [each["sum"] for each in found(tmp_path)] == [1.0, 1.0]


def test_a_module_with_its_package_and_what_a_script_imports_beside_it(tmp_path: Path) -> None:
    package = tmp_path / "pkg"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "layers.py").write_text("WIDTH = 3\n")
    text = "import sys, pathlib\nfrom pkg.layers import WIDTH\nimport os\n"
    text += "pathlib.Path(sys.argv[1], os.environ['RANK']).write_text(str(WIDTH))\n"
    (package / "train.py").write_text(f"{text}assert __package__ == 'pkg'\n")
    out = tmp_path / "out"
    out.mkdir()
    with command("--ranks", "2", "-m", "pkg.train", str(out), PYTHONPATH=str(tmp_path)) as process:
        assert process.wait(60) == 0
    assert found(out) == [3, 3]
    script(tmp_path, text)
    assert run(tmp_path / "train.py", str(out)) == [None, None]


def test_siblings_of_a_script_travel_with_it(tmp_path: Path) -> None:
    """Executors have no such directory: here the ranks can't use it, as it is renamed before they start."""
    from tritium.gang.driver import programs
    from tritium.gang.settings import Gang

    (tmp_path / "net.py").write_text("import deeper\n")
    (tmp_path / "deeper.py").write_text("")
    (tmp_path / "other.py").write_text("")
    path = script(tmp_path, "import net, os, json\nimport numpy\n")
    program, gang = programs.find(str(path), [], {}, Gang(on="driver"))
    assert sorted(Path(file).name for file in gang.py_files) == ["deeper.py", "net.py"]
    assert program.content == path.read_bytes()


def test_rows_of_a_file_are_a_shard(tmp_path: Path) -> None:
    pd.DataFrame({"x": range(10)}).to_parquet(tmp_path / "rows.parquet")
    text = """
import pathlib, sys
import tritium as tr
world = tr.world()
(epoch,) = world.shard("train").epochs(1, batch_size=2)
total = sum(int(batch["x"][: batch.rows].sum()) for batch in epoch)
pathlib.Path(sys.argv[1], str(world.rank)).write_text(str(sum(world.gather(total))))
"""
    path = script(tmp_path, text)
    words = ("--ranks", "2", "--data", f"train={tmp_path}/rows.parquet")
    for more in ((), ("--master", "local[2]", "--conf", "spark.ui.enabled=false")):
        with command(*words, *more, str(path), str(tmp_path)) as process:
            text = process.communicate(timeout=120)[0]
        assert process.returncode == 0, text
        assert found(tmp_path) == [45, 45]
        tmp_path.joinpath("0").unlink()


@pytest.mark.parametrize(
    ("line", "message", "code"),
    [
        ("import sys; sys.exit(3)", r"it called sys.exit\(3\)", 3),
        ("raise ValueError('mine')", "raised ValueError: mine", None),
        ("import os; os._exit(4)", "left with exit code 4", 4),
        ("import os; os.kill(os.getpid(), 9)", "killed by SIGKILL", -9),
    ],
)
def test_the_end_of_a_script_is_that_of_its_rank(tmp_path: Path, line: str, message: str, code: int | None) -> None:
    path = script(tmp_path, f"import tritium\nif tritium.world().rank == 1:\n    {line}\ntritium.world().barrier()\n")
    with pytest.raises(RankFailed, match=message) as caught:
        run(path)
    assert (caught.value.rank, caught.value.exit_code) == (1, code)
    if code in (3, None):
        assert f'File "{path}", line 3' in str(caught.value)
        assert line.partition("; ")[2] in str(caught.value) or line in str(caught.value), "the line itself is shown"


def test_a_failure_is_exit_code_1_and_sys_exit_0_is_none(tmp_path: Path) -> None:
    path = script(tmp_path, "import sys; sys.exit(int(sys.argv[1]))")
    assert run(path, "0") == [None, None]
    with command("--ranks", "2", "--retries", "0", str(path), "3") as process:
        text = process.communicate(timeout=60)[0]
    assert process.returncode == 1
    assert "it called sys.exit(3)" in text


WAITS = """
import os, signal, sys, time
def stop(*_):
    print("saving", os.environ["RANK"], flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, stop)
print("ready", flush=True)
while True:
    signal.pause()
"""


def test_a_signal_reaches_every_rank_which_has_time_to_end(tmp_path: Path) -> None:
    with command("--ranks", "2", "--no-progress", str(script(tmp_path, WAITS))) as process:
        assert process.stdout is not None
        while sum(line.rstrip().endswith("ready") for line in iter_lines(process, 2)) < 2:
            pass
        process.send_signal(signal.SIGTERM)
        text = process.stdout.read()
        assert process.wait(30) == 1
    assert "saving 0" in text
    assert "saving 1" in text
    assert "ended by SIGTERM; every rank has ended" in text


def iter_lines(process: subprocess.Popen[str], count: int) -> list[str]:
    """Read `count` lines that a rank has written."""
    assert process.stdout is not None
    lines: list[str] = []
    while len(lines) < count:
        line = process.stdout.readline()
        assert line, "it has ended"
        lines += [line] if line.startswith("[rank") else []
    return lines


def test_a_second_signal_ends_ranks_that_take_no_notice(tmp_path: Path) -> None:
    deaf = "import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nprint('ready', flush=True)\nsignal.pause()\n"
    with command("--ranks", "2", "--no-progress", str(script(tmp_path, deaf))) as process:
        iter_lines(process, 2)
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 1


def test_bad_input(tmp_path: Path) -> None:
    path = script(tmp_path, "x = 1\n")
    broken = script(tmp_path, "x = (\n", "broken.py")
    plain = script(tmp_path, "text", "notes.txt")
    for program, args, settings, message in (
        (tmp_path / "trian.py", (), {}, r"no file 'trian.py' in .*Did you mean 'train.py'\?"),
        ("no.such.module", (), {}, "no module of that name"),
        ("-m no.such", (), {}, "There is no module 'no.such'"),
        (broken, (), {}, "broken.py can't be run: .*was never closed"),
        (plain, (), {}, "neither a Python file nor executable: chmod"),
        (path, (), {"on": "here", "ranks": 1}, 'on="driver"'),
        (path, (), {"kwargs": {"lr": 1}}, "takes arguments by args"),
    ):
        with pytest.raises(BadSetting, match=message):
            run(program, *args, **settings)
    with pytest.raises(BadSetting, match="are a list of strings"):
        tr.launch(path, ranks=2, on="driver", args=[1])
    with pytest.raises(BadSetting, match="are a list of strings"):
        tr.launch(path, ranks=2, on="driver", args="--lr 1")


def test_from_a_shell_bad_input_is_one_line(tmp_path: Path) -> None:
    path = script(tmp_path, "x = 1\n")
    for words, message in (
        (("--ranks", "two"), "neither a number of ranks"),
        (("--lr", "0.1"), "The program's own options come after it: tritium run --ranks 2 train.py --lr 0.1"),
        (("--data", "train"), "no NAME=VALUE"),
        (("--data", "train=nothing.parquet"), "there is no nothing.parquet"),
        (("--conf", "spark.x=1"), "--master local[2]"),
    ):
        with command(*words, str(path)) as process:
            text = process.communicate(timeout=60)[0]
        assert process.returncode in (1, 2)
        assert message in " ".join(text.split())
        assert "Traceback" not in text


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["SCRIPT", "--ranks", "2"],
            "--ranks after SCRIPT would be an argument of the program, which does not name it",
        ),
        (["SCRIPT", "--run-dir=x"], "come before the program: tritium run --run-dir … SCRIPT …"),
        (["--ranks", "1", "SCRIPT", "--data", "x"], "['--data', 'x']"),
        (["--ranks", "1", "SCRIPT", "x", "--", "--lr", "1", "-h"], "['x', '--', '--lr', '1', '-h']"),
        (["--ranks", "1", "SCRIPT", "--", "--ranks", "3"], "['--ranks', '3']"),
        (
            ["-m", "json.tool", "--retries", "3"],
            "tritium: --retries is passed to json.tool. If it is meant for tritium",
        ),
    ],
)
def test_what_follows_the_program_is_the_programs(words: list[str], said: str, tmp_path: Path) -> None:
    path = str(script(tmp_path, "import sys\ndata = print(sys.argv[1:])\n"))
    with command(*[path if word == "SCRIPT" else word for word in words], cwd=tmp_path) as process:
        text = " ".join(process.communicate(timeout=60)[0].split())
    assert said.replace("SCRIPT", path) in text


def test_a_script_that_imports_an_unnamed_framework_is_warned_about(tmp_path: Path) -> None:
    path = script(tmp_path, "def later():\n    import jax\n")
    with pytest.warns(TritiumWarning, match="imports jax, .*Give framework='jax'"):
        run(path)

"""Settings and functions that can't work, each with its own clear error before anything starts."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import tritium as tr
from tritium.errors import BadData, BadFunction, BadSetting, SetupError, TritiumWarning


def nothing(*_: Any) -> None:
    """Do nothing: it is never called."""
    raise AssertionError("this must not start")


def refused(kind: type[SetupError], fn: Any = nothing, **settings: Any) -> str:
    with pytest.raises(kind) as caught:
        tr.launch(fn, **{"on": "driver", "progress": False, **settings})
    return str(caught.value)


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ({"ranks": 0}, "ranks=0 must be a whole number of at least 1"),
        ({"ranks": -2}, "ranks=-2 must be"),
        ({"ranks": 1.5}, "ranks=1.5 must be"),
        ({"ranks": True}, "ranks=True must be"),
        ({"ranks": "2"}, "ranks='2' must be"),
        ({"gpus": -1}, "gpus=-1 must be a whole number of at least 0"),
        (
            {"gpus": 0.7},
            "gpus=0.7 must be a whole number of at least 0, or a fraction of a GPU that ranks",
        ),
        ({"gpus": 1.5}, "gpus=1.5 must be a whole number"),
        ({"gpus": float("nan")}, "gpus=nan must be a whole number"),
        ({"gpus": "1"}, "gpus='1' must be a whole number"),
        ({"gpus": True}, "gpus=True must be a whole number"),
        ({"accelerator": "npu"}, "accelerator='npu' needs gpus=, the number of them that a rank has: gpus=1"),
        ({"accelerator": "a.b", "gpus": 1}, "accelerator='a.b' must be the name of a resource in Spark"),
        ({"accelerator": None, "gpus": 1}, "accelerator=None must be the name of a resource in Spark"),
        ({"accelerator": "npu", "gpus": 1, "on": "driver"}, "only Spark tells where those are, and on='driver'"),
        ({"gpu_type": "H100"}, "gpu_type='H100' needs GPUs: gpus=1"),
        ({"gpu_type": "H100", "gpus": 1, "accelerator": "npu"}, "gpu_type='H100' needs GPUs: gpus=1"),
        ({"gpu_type": ["H100", ""], "gpus": 1}, "gpu_type=['H100', ''] must be a part of a GPU's name"),
        ({"gpu_type": 100, "gpus": 1}, "gpu_type=100 must be a part of a GPU's name"),
        ({"gpu_type": "H100", "gpus": 1, "on": "here"}, 'on="here" starts none, on="driver" does'),
        ({"mixed": True, "gpus": 1}, "mixed=True is unknown; choose one of 'refuse', 'allow'"),
        ({"accelerator_type": "H100"}, "Did you mean 'gpu_type'?"),
        ({"cpus": 0}, "cpus=0 must be a whole number of at least 1"),
        ({"on": "mars"}, "on='mars' is unknown; choose one of 'cluster', 'driver', 'here'"),
        ({"output": "rank 1"}, "output='rank 1' is unknown; choose one of 'all', 'rank 0', 'none'"),
        ({"framework": "pytorch"}, "framework='pytorch' is unknown. Did you mean 'torch'?"),
        ({"on": "here", "ranks": 2}, 'ranks=2 must be 1; on="driver" starts several'),
        ({"start_timeout": 0}, "start_timeout=0 must be a number of seconds above 0"),
        ({"start_timeout": float("nan")}, "start_timeout=nan must be"),
        ({"stall_timeout": float("nan")}, "stall_timeout=nan must be a number of seconds above 0"),
        ({"replacement_timeout": 0}, "replacement_timeout=0 must be a number of seconds above 0"),
        ({"stall_timeout": 0}, "stall_timeout=0 must be a number of seconds above 0"),
        ({"progress": "no"}, "progress='no' is unknown; choose one of True, False"),
        ({"trace": "no"}, "trace='no' is unknown; choose one of True, False, 'torch', or 'torch:100-104'"),
        ({"trace": "torch:9-5"}, "trace='torch:9-5' is unknown; choose one of True, False, 'torch'"),
        ({"trace": "torch:-5"}, "trace='torch:-5' is unknown"),
        (
            {"trace": "torch", "framework": "jax"},
            "for framework='torch', 'lightning', 'huggingface' or None. With ",
        ),
        ({"trace": "torch", "framework": tr.Keras(backend="torch")}, "With 'keras', trace= is True or False"),
        (
            {"trace": "torch"},
            "are the batches of world.shard(name), and this launch has no data=",
        ),
        ({"trace": "torch", "on": "here"}, "trace='torch' hooks into torch, which on=\"here\" would leave"),
        ({"on_stall": "kill"}, "on_stall='kill' is unknown; choose one of 'end', 'report'"),
        ({"start_timeout": "10s"}, "start_timeout='10s' must be"),
        ({"env": {"A": 1}}, "env['A']=1: names and values must be strings"),
        ({"py_files": "code.py"}, "py_files='code.py' must be a list of paths"),
        ({"rank": 2}, "There is no setting 'rank' of a gang. Did you mean 'ranks'?"),
        ({"colour": "red"}, "There are: ranks, cpus, gpus"),
        *(
            ({name: 2}, f"There is no setting {name!r} of a gang. Did you mean 'ranks'?")
            for name in ("num_workers", "num_processes", "num_proc", "np", "nprocs", "world_size", "nproc_per_node")
        ),
        ({"use_gpu": True}, "Did you mean 'gpus'?"),
        ({"max_restarts": 3}, "Did you mean 'retries'?"),
    ],
)
def test_a_wrong_setting(setting: dict[str, Any], said: str) -> None:
    assert said in refused(BadSetting, **setting)


def test_arguments_of_the_function_that_are_given_to_launch() -> None:
    with pytest.raises(BadSetting, match=r"gang=0\.01 is no tritium\.Gang\. .* args=\(0\.01,\), .* ranks=2"):
        tr.launch(nothing, 0.01, ranks=2)  # type: ignore[arg-type]

    def train(lr: float) -> None:
        raise AssertionError(lr)

    assert "Pass it as kwargs={'lr': …}." in refused(BadSetting, train, lr=0.01)


def test_all_wrong_settings_are_said_at_once() -> None:
    with pytest.raises(BadSetting) as caught:
        tr.Gang(ranks=0, gpus=-1, output="loud")  # type: ignore[arg-type]
    assert [said.partition("=")[0] for said in caught.value.settings] == ["ranks", "gpus", "output"]


def test_a_setting_of_a_given_gang_is_checked_too() -> None:
    with pytest.raises(BadSetting, match="ranks=0"):
        tr.launch(nothing, tr.Gang(ranks=2, on="driver"), ranks=0)


class TestFunctions:
    def test_that_are_none(self) -> None:
        assert "not 3. Pass it without calling it" in refused(BadSetting, 3)

    def test_that_capture_what_cant_be_pickled(self) -> None:
        lock = threading.Lock()
        assert "'lock' (a _thread.lock)" in refused(BadFunction, lambda: lock)

    def test_with_arguments_that_cant_be_pickled(self) -> None:
        said = refused(BadFunction, nothing, args=(1, {"opened": threading.Lock()}))
        assert "args[1]['opened']" in said

    @pytest.mark.processes
    def test_that_name_a_gpu_are_warned_of(self) -> None:
        with pytest.warns(TritiumWarning, match=r"'cuda:0'"):
            tr.launch(lambda: "cuda:0", on="driver", progress=False)

    @pytest.mark.processes
    def test_that_capture_much_are_warned_of(self) -> None:
        table = np.zeros(11 << 17)
        with pytest.warns(TritiumWarning, match=r"'table'.* is 12 MB, sent with every task"):
            assert tr.launch(lambda: table.size, on="driver", progress=False) == [11 << 17]


class TestData:
    def test_that_is_no_mapping(self) -> None:
        frame = pd.DataFrame({"x": [1.0]})
        assert 'must be a mapping of names: data={"train": df}' in refused(BadSetting, data=frame)

    @pytest.mark.parametrize("name", ["", "my data", 3])
    def test_with_a_name_that_is_none(self, name: Any) -> None:
        frame = pd.DataFrame({"x": [1.0]})
        assert "must be an identifier, such as 'train'" in refused(BadSetting, data={name: frame})


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ({"nulls": "mask"}, "nulls='mask' must be a mapping from columns: nulls={'x': 'mask'}."),
        ({"nulls": 0}, "nulls=0 must be a mapping from columns: nulls={'x': 0}."),
        ({"pad": 3}, "pad=3 must be a mapping from columns: pad={'x': 3}."),
        ({"hash_buckets": 10}, "hash_buckets=10 must be a mapping from columns: hash_buckets={'x': 10}."),
        ({"vocabulary": ["a", "b"]}, "must be a mapping from columns: vocabulary={'x': ['a', 'b']}."),
        ({"decode": len}, "decode=len must be a mapping from columns: decode={'x': len}."),
    ],
)
def test_a_setting_of_data_that_is_by_column(setting: dict[str, Any], said: str) -> None:
    with pytest.raises(BadSetting) as caught:
        tr.Data(pd.DataFrame({"x": [1.0], "y": [2.0]}), **setting)
    assert said in str(caught.value)


def test_a_launch_that_is_refused_leaves_no_run_directory(tmp_path: Path) -> None:
    lock = threading.Lock()
    refused(BadFunction, lambda: lock, run_dir=str(tmp_path / "run"))
    refused(BadData, data={"train": 3}, run_dir=str(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_gpus_that_this_machine_has_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")  # no nvidia-smi
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(SetupError, match=r"(?i)gpu"):
        tr.launch(nothing, ranks=1, gpus=1, on="driver", progress=False)

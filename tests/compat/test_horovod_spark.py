"""The estimators of `horovod.spark`: parameters, store, refusals, and trainings on the driver, without a JVM."""

from __future__ import annotations

import importlib
import json
import posixpath
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from tritium.compat.horovod.spark.common import params, reach
from tritium.compat.horovod.spark.common.backend import SparkBackend
from tritium.compat.horovod.spark.common.store import DBFSLocalStore, FilesystemStore, LocalStore, Store
from tritium.compat.horovod.spark.common.training import transformed
from tritium.compat.horovod.spark.lightning.estimator import TorchEstimator as LightningEstimator
from tritium.compat.horovod.spark.torch.estimator import TorchEstimator, TorchModel
from tritium.compat.horovod.spark.torch.modules import loaded
from tritium.errors import BadData, BadSetting, StoreFailed, TritiumWarning
from tritium.gang.driver.launch import launch

PAGE = Path(__file__).parents[2] / "docs" / "migrate" / "horovod-spark.md"


@pytest.fixture(autouse=True)
def _names() -> None:
    """Make the names of Horovod importable, in ranks too, for the time of a test."""
    importlib.import_module("tritium.compat")


def estimators() -> list[Any]:
    keras = importlib.import_module("tritium.compat.horovod.spark.keras.estimator")
    return [TorchEstimator, keras.KerasEstimator, LightningEstimator]


def estimator(store: Any, **given: Any) -> TorchEstimator:
    net = torch.nn.Linear(2, 1, bias=False)
    torch.nn.init.zeros_(net.weight)
    return TorchEstimator(
        **{
            "model": net,
            "optimizer": torch.optim.SGD(net.parameters(), lr=0.1),
            "loss": torch.nn.MSELoss(),
            "store": store,
            "feature_cols": ["x"],
            "label_cols": ["y"],
            "input_shapes": [[-1, 2]],
            "batch_size": 4,
            "verbose": 0,
            **given,
        }
    )


def rows(count: int = 16) -> pa.Table:
    x = np.random.default_rng(0).uniform(-1, 1, (count, 2))
    return pa.table({"x": list(x), "y": 3 * x[:, 0] - x[:, 1]})


def test_each_parameter_has_a_getter_and_a_setter_and_a_row_on_the_page() -> None:
    page = PAGE.read_text()
    for kind in estimators():
        one = kind()
        for name, parameter in kind.parameters.items():
            assert f"`{name}`" in page, name
            default = [] if parameter.default == () else parameter.default
            assert getattr(one, f"get{parameter.methods}")() == default
            assert callable(getattr(one, f"set{parameter.methods}"))
    one = TorchEstimator(batch_size=16).setEpochs(3).setNumProc(2)
    assert (one.getBatchSize(), one.getEpochs(), one.getNumProc()) == (16, 3, 2)
    assert TorchModel(label_columns=["y"]).getOutputCols() == ["y__output"]


def test_what_is_refused_and_what_is_not_needed() -> None:
    with pytest.raises(BadSetting, match=r"TorchEstimator\(data_module=…\): there are no Parquet files to read"):
        TorchEstimator(data_module=object)
    with pytest.raises(BadSetting, match=r"train_minibatch_fn=…\): Lightning's Trainer runs the loop"):
        LightningEstimator(train_minibatch_fn=print)
    with pytest.raises(TypeError, match="unexpected keyword argument 'batchsize'"):
        TorchEstimator(batchsize=3)
    with pytest.raises(ValueError, match="only one of loss_constructors and loss"):
        TorchEstimator(loss=torch.nn.MSELoss(), loss_constructors=[print])
    params._said.clear()
    with pytest.warns(TritiumWarning, match=r"reader_pool_type=…\) has no effect: rows go from Spark straight"):
        TorchEstimator(reader_pool_type="process")
    TorchEstimator(reader_pool_type="process", partitions_per_process=10)  # said once; a default is not said
    with pytest.raises(BadSetting, match=r"SparkBackend\(use_mpi=…\): ranks find each other without MPI"):
        SparkBackend(2, use_mpi=True)


def test_settings_that_do_not_fit_are_refused_before_anything_starts(tmp_path: Path) -> None:
    store = Store.create(str(tmp_path))
    with pytest.raises(BadData, match="feature_cols: the DataFrame has no column 'z'"):
        estimator(store, feature_cols=["z"])._check(["x", "y"])
    with pytest.raises(BadSetting, match="store is required"):
        estimator(None)._checked_store()
    with pytest.raises(BadSetting, match='"backend" and "num_proc"'):
        estimator(store, backend=SparkBackend(1), num_proc=2)._backend()
    with pytest.raises(BadSetting, match=r"must be in the range: \[0, 1\)"):
        estimator(store, validation=1.5)._check(["x", "y"])
    with pytest.raises(BadSetting, match="Feature column count 1 must equal model inputs count 2"):
        estimator(store, input_shapes=[[-1, 2], [-1]])._check(["x", "y"])


def test_the_store_has_the_paths_of_horovod_on_any_file_system(tmp_path: Path) -> None:
    store = Store.create(str(tmp_path / "store"))
    assert isinstance(store, FilesystemStore)
    assert store.get_checkpoint_path("one") == f"file://{tmp_path}/store/runs/one"
    assert store.get_train_data_path(3) == f"file://{tmp_path}/store/intermediate_train_data.3"
    assert store.get_logs_path("one") == f"file://{tmp_path}/store/runs/one/logs"
    store.write_text(store.get_run_path("one") + "/a.ckpt", "text")
    assert store.read(store.get_run_path("one") + "/a.ckpt") == b"text"
    assert [posixpath.basename(path) for path in store.get_checkpoints("one")] == ["a.ckpt"]
    memory = Store.create("memory://store", save_runs=False)
    memory.write_text("memory://store/a", "b")
    assert memory.exists("memory://store/a")
    assert memory.get_checkpoint_path("one") is None
    dbfs = Store.create("dbfs:/store")
    assert isinstance(dbfs, DBFSLocalStore)
    assert dbfs.get_checkpoint_path("one") == "file:///dbfs/store/runs/one"
    with pytest.raises(ValueError, match="not a DBFS path"):
        DBFSLocalStore("/store")
    with pytest.raises(BadSetting, match="can't be opened"):
        Store.create("nothing://store")
    assert LocalStore(str(tmp_path)).get_runs_path().startswith("file://")


def test_a_store_that_is_not_reached_is_named(tmp_path: Path) -> None:
    store = Store.create(str(tmp_path))
    with reach.marked(store, "one") as mark:
        reach.check_reached(store, mark, "there")
    with pytest.raises(StoreFailed, match=f"The store file://{tmp_path} of the driver can't be reached on host there"):
        reach.check_reached(store, mark, "there")
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(BadSetting, match="The store can't be written at"),
        reach.marked(Store.create(str(tmp_path / "file")), "one"),
    ):
        pass


def test_torch_trains_with_the_learning_rate_times_the_ranks(tmp_path: Path) -> None:
    store = Store.create(str(tmp_path))
    one = estimator(store, epochs=2, validation=0.5, metrics=[[torch.nn.functional.l1_loss]])
    training = one._training({}, store, "one", None)
    data = {name: training._reading(rows()) for name in ("train", "validation")}
    options: dict[str, Any] = {"framework": "horovod", "progress": False, "run_dir": str(tmp_path / "run")}
    results = launch(training, ranks=2, on="driver", data=data, args=one._arguments("one", {}), **options)
    history, state = results[0]
    assert results[1] is None
    assert [entry["epoch"] for entry in history] == [0, 1]
    assert set(history[0]["train"]) == {"loss", "all_metrics"}
    assert (
        history[1]["validation"]["all_metrics"][0]["group_0_y"]
        < history[0]["validation"]["all_metrics"][0]["group_0_y"]
    )
    assert loaded(state)["optimizer"]["param_groups"][0]["lr"] == 0.1
    table, weights = rows(), torch.zeros(2, dtype=torch.float64)
    x, y = torch.tensor(np.stack(table["x"].to_pylist())), torch.tensor(table["y"].to_pylist())
    shuffled = one.copy({one.shuffle: False, one.epochs: 1, one.batch_size: 8, one.validation: None})
    training = shuffled._training({}, store, "two", None)
    data = {"train": training._reading(table)}
    (_, state), _ = launch(training, ranks=2, on="driver", data=data, args=shuffled._arguments("two", {}), **options)
    weights -= 0.2 * (2 * (x @ weights - y)[:, None] * x).mean(0)  # one step over all rows, at 0.1 times 2 ranks
    assert torch.allclose(loaded(state)["model"]["weight"][0].double(), weights, atol=1e-5)
    assert store.exists(store.get_checkpoint_path("two") + "/checkpoint")


def test_a_backend_of_ones_own_trains_on_parquet_and_a_run_id_continues(tmp_path: Path) -> None:
    store = Store.create(str(tmp_path))
    pq.write_table(rows(), tmp_path / "train.parquet")
    one = estimator(store, epochs=3, run_id="one")
    parquet = {"train": f"file://{tmp_path}/train.parquet"}
    history, state = one._training({}, store, "one", None, parquet)(*one._arguments("one", {}))
    again, _ = one._training({}, store, "one", None, parquet)(*one._arguments("one", {}))
    assert again[0]["train"]["loss"] < history[0]["train"]["loss"]
    assert loaded(state)["model"]["weight"].abs().sum() > 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WORLD_SIZE", "2")
        with pytest.raises(BadSetting, match="A Backend of your own trains on one process"):
            one._training({}, store, "one", None, parquet)(*one._arguments("one", {}))


def test_transformation_fn_gets_a_frame_of_rows(tmp_path: Path) -> None:
    def twice(frame: Any) -> Any:
        frame["x"] = frame["x"] * 2
        frame["z"] = [np.ones(4)] * len(frame)
        return frame

    given = estimator(
        Store.create(str(tmp_path)),
        transformation_fn=twice,
        transformation_edit_fields=[("z", np.float32, (2, 2), False)],
        transformation_removed_fields=["y"],
    )
    settings = given._training({}, given.getStore(), "one", None).namespace()
    found = transformed({"x": np.ones(3), "y": np.ones(3)}, settings)
    assert found["x"].tolist() == [2, 2, 2]
    assert (found["z"].shape, found["z"].dtype, "y" in found) == ((3, 2, 2), np.float32, False)
    settings.transformation_fn = lambda frame: None
    with pytest.raises(BadSetting, match="transformation_fn returned a NoneType"):
        transformed({"x": np.ones(3)}, settings)


def test_a_step_with_several_losses_weights_of_rows_and_a_minibatch_function(tmp_path: Path) -> None:
    class Two(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last = torch.nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            found = self.last(x)
            return found[:, :1], found[:, 1:]

    net = Two()
    table = rows().append_column("z", rows()["y"]).append_column("w", pa.array([1.0] * 8 + [0.0] * 8))
    pq.write_table(table, tmp_path / "train.parquet")
    one = estimator(
        Store.create(str(tmp_path), save_runs=False),
        model=net,
        optimizer=torch.optim.Adam(net.parameters(), lr=0.1),
        loss=torch.nn.functional.mse_loss,
        loss_weights=[0.75, 0.25],
        label_cols=["y", "z"],
        sample_weight_col="w",
        epochs=4,
        train_steps_per_epoch=3,
        backward_passes_per_step=2,
    )
    parquet = {"train": f"file://{tmp_path}/train.parquet"}
    history, _ = one._training({}, one.getStore(), "one", None, parquet)(*one._arguments("one", {}))
    assert history[-1]["train"]["loss"] < history[0]["train"]["loss"]
    assert not (tmp_path / "runs").exists()
    assert json.dumps(history)

"""`framework="tensorflow"`: TF_CONFIG and roles, and a shard's batches as a dataset."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import tritium as tr
from machines import can_make_hosts, run_on_hosts
from tritium.errors import BadSetting, TritiumWarning

RNG = np.random.default_rng(0)
X = RNG.normal(size=(29, 2)).astype("float32")
ROWS = pd.DataFrame({"x": list(X), "y": X @ np.array([2, -1], "float32"), "id": np.arange(29), "b": [b"bytes"] * 29})


def run(fn: Any, **settings: Any) -> list[Any]:
    quiet = {"ranks": 2, "on": "driver", "progress": False, "output": "none", "data": {"train": ROWS}, "retries": 0}
    return tr.launch(fn, **{**quiet, "framework": "tensorflow", **settings})


def fitted() -> dict[str, Any]:
    """Return what tf_keras learns in three epochs of steps of 16 rows, of all ranks together."""
    import tensorflow as tf
    import tf_keras

    world = tr.world()
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model = tf_keras.Sequential([tf_keras.layers.Dense(1, kernel_initializer="zeros")])
        model.compile(tf_keras.optimizers.SGD(0.1), "mse", steps_per_execution=2)
    shard = world.shard("train")
    rows = shard.tensorflow(batch_size=16 // world.size, columns=("x", "y"), shuffle=False)
    history = model.fit(rows.prefetch(1), epochs=3, verbose=0)
    return {
        "steps": (int(rows.cardinality()), int(model.optimizer.iterations.numpy())),
        "losses": len(history.history["loss"]),
        "weights": [float(w) for array in model.get_weights() for w in array.ravel()],
        "used": [epoch["used"] for epoch in shard.report()],
        "size": strategy.num_replicas_in_sync,
    }


def alone(ranks: int) -> list[float]:
    """Return what NumPy learns on the same rows in the same steps, in one process."""
    x = np.concatenate([X, np.ones((29, 1))], axis=1)
    shards = [np.arange(29)[rank::ranks] for rank in range(ranks)]
    w = np.zeros(3)
    for _ in range(3):
        for step in range(2):
            own = 16 // ranks
            rows = np.concatenate([shard[step * own : (step + 1) * own] for shard in shards])
            w -= 0.1 * 2 * x[rows].T @ (x[rows] @ w - ROWS["y"].to_numpy()[rows]) / len(rows)
    return w.tolist()


class TestKeras:
    """Each step is that of one process on the rows of all ranks, also the last, in which one rank has fewer."""

    def check(self, found: list[dict[str, Any]], used: list[int]) -> None:
        for each, rows in zip(found, used, strict=True):
            assert (each["steps"], each["losses"], each["size"]) == ((2, 6), 3, len(used))
            assert each["used"] == [rows] * 3, "every row once an epoch"
            np.testing.assert_allclose(each["weights"], found[0]["weights"])

    def test_on_two_ranks(self) -> None:
        found = run(fitted)
        self.check(found, [15, 14])
        np.testing.assert_allclose(found[0]["weights"], alone(2), rtol=1e-4, atol=1e-5)

    def test_in_this_process(self) -> None:
        """In one of its own, as TensorFlow stays in a process, with its threads."""
        env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
        run = subprocess.run([sys.executable, __file__], check=False, capture_output=True, text=True, env=env)
        assert run.returncode == 0, run.stderr


def test_datasets_and_what_is_wrong_with_them(tmp_path: Path) -> None:
    def train() -> None:
        import tensorflow as tf

        shard = tr.world().shard("train")
        whole = shard.tensorflow(batch_size=8)
        assert {name: (spec.shape.as_list(), spec.dtype) for name, spec in whole.element_spec.items()} == {
            "x": ([8, 2], tf.float32),
            "y": ([8], tf.float32),
            "id": ([8], tf.int64),
            "b": ([8], tf.string),
            "sample_weight": ([8], tf.float32),
        }
        assert whole.options().experimental_distribute.auto_shard_policy.name == "OFF"
        last = list(whole)[-1]
        own = shard.rows - 8
        assert last["sample_weight"].numpy().tolist() == [np.float32(16 / 13)] * own + [0.0] * (8 - own)
        assert last["b"].numpy()[0] == b"bytes"
        nested = shard.tensorflow(batch_size=8, columns={"in": ("x", "id"), "w": "sample_weight"})
        assert [spec.shape.as_list() for spec in tf.nest.flatten(nested.element_spec)] == [[8, 2], [8], [8]]
        for remainder, steps in (("drop", 1), ("repeat", 2)):
            plain = shard.tensorflow(batch_size=8, columns="id", remainder=remainder)
            assert plain.cardinality() == steps == len(list(plain))
        seen = [np.sort(np.concatenate([b["id"][b["sample_weight"] > 0] for b in whole])) for _ in range(2)]
        assert len(seen[0]) == shard.rows
        assert (seen[0] == seen[1]).all()

        with pytest.raises(BadSetting, match=r"shard 'train' has no column 'z'; it has "):
            shard.tensorflow(batch_size=8, columns=("x", "z"))
        with pytest.raises(BadSetting, match=r"columns='x' has no place for their weights"):
            shard.tensorflow(batch_size=8, columns="x")
        with pytest.raises(BadSetting, match="remainder='pda' is none of"):
            shard.tensorflow(batch_size=8, remainder="pda")

    run(train, output="all", run_dir=str(tmp_path / "run"))
    said = [path.read_text() for path in sorted(tmp_path.glob("run/logs/*"))]
    assert "".join(said) == "", "TensorFlow says nothing of itself"


def parameters(killed: Path) -> dict[str, Any]:
    """Train on a worker, with the variable on a parameter server; the first time, kill it. The chief calls this."""
    import tensorflow as tf

    world = tr.world()
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    strategy = tf.distribute.ParameterServerStrategy(resolver)
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        w = tf.Variable(0.0)

    def rows() -> Any:
        return tf.data.Dataset.range(1, 4).repeat()

    @tf.function
    def step(iterator: Any) -> Any:
        x = tf.cast(next(iterator), tf.float32)
        w.assign_add(0.05 * (2 * x - w * x))
        return x

    iterator = iter(coordinator.create_per_worker_dataset(rows))
    for _ in range(200):
        coordinator.schedule(step, args=(iterator,))
    coordinator.join()
    if not killed.exists():
        killed.touch()
        os.kill(world.peers[1].pid, 9)
        coordinator.schedule(step, args=(iterator,))
        coordinator.join()  # waits for a worker that comes back
    return {"w": float(w.numpy()), "on": w.device, "roles": dict(resolver.cluster_spec().as_dict())}


def test_parameter_servers(tmp_path: Path) -> None:
    """Also that a worker's end ends the gang, which is tried again: TensorFlow would wait for it to come back."""
    settings = {"ranks": 3, "framework": tr.TensorFlow(ps=1), "data": None, "retries": 1, "run_dir": str(tmp_path)}
    chief, worker, server = run(parameters, args=(tmp_path / "killed",), **settings)
    (retry,) = json.loads((tmp_path / "report.json").read_text())["retries"]
    assert "rank 1 " in retry["reason"]
    assert "SIGKILL" in retry["reason"]
    assert (worker, server) == (None, None)
    assert chief["w"] == pytest.approx(2, abs=1e-3)
    assert "/job:ps" in chief["on"]
    assert {job: len(addresses) for job, addresses in chief["roles"].items()} == {"chief": 1, "worker": 1, "ps": 1}


def test_keras_of_the_function_may_run_on_torch(tmp_path: Path) -> None:
    def train() -> tuple[str, list[int]]:
        import keras
        import tensorflow as tf
        import torch

        torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], 0.1)
        strategy = tf.distribute.MultiWorkerMirroredStrategy()
        return keras.backend.backend(), strategy.num_replicas_in_sync

    assert run(train, data=None, env={"KERAS_BACKEND": "torch"}) == [("torch", 2)] * 2


def test_a_function_under_torch_may_import_tensorflow_first() -> None:
    def train() -> bool:
        import tensorflow
        import torch._dynamo  # which imports triton, as torch's optimizers may

        return tensorflow.executing_eagerly() and torch._dynamo.config.cache_size_limit > 0

    assert tr.launch(train, on="driver", ranks=1, framework="torch", progress=False, retries=0) == [True]


def test_bad_settings() -> None:
    for ps in (-1, "1", True):
        with pytest.raises(BadSetting, match=r"TensorFlow\(ps=.*: a number of parameter servers, at least 0"):
            run(fitted, framework=tr.TensorFlow(ps=ps))
    with pytest.raises(BadSetting, match=r"TensorFlow\(ps=2\) needs at least 4 ranks .* and the gang may have 3"):
        run(fitted, framework=tr.TensorFlow(ps=2), ranks=3)
    with pytest.raises(BadSetting, match=r"TensorFlow\(ps=1\) takes no data=: .* MultiWorkerMirroredStrategy"):
        run(fitted, framework=tr.TensorFlow(ps=1), ranks=3)


def test_tensorflow_that_was_not_named_is_a_warning(tmp_path: Path) -> None:
    def train() -> None:
        import tensorflow

        assert tensorflow.__version__ == "0"

    tmp_path.joinpath("tensorflow.py").write_text("__version__ = '0'\n")
    with pytest.warns(TritiumWarning, match=r"imports tensorflow, .* Give framework='tensorflow'"):
        run(train, framework=None, data=None, env={"PYTHONPATH": str(tmp_path)})


@pytest.mark.skipif(not can_make_hosts(), reason="only root may make network namespaces")
def test_ranks_on_two_hosts_find_each_other_by_address(tmp_path: Path) -> None:
    def train() -> None:
        import tensorflow as tf

        strategy = tf.distribute.MultiWorkerMirroredStrategy()

        @tf.function
        def total() -> Any:
            def own() -> Any:
                context = tf.distribute.get_replica_context()
                return context.all_reduce(tf.distribute.ReduceOp.SUM, tf.constant(tr.world().rank + 1.0))

            return strategy.run(own)

        (tmp_path / str(tr.world().rank)).write_text(f"{strategy.num_replicas_in_sync} {float(total())}")

    run_on_hosts(train, framework=tr.TensorFlow(), seconds=100.0)
    assert [tmp_path.joinpath(name).read_text() for name in "01"] == ["2 3.0", "2 3.0"]


if __name__ == "__main__":
    (only,) = run(fitted, ranks=1, on="here")
    TestKeras().check([only], [29])
    np.testing.assert_allclose(only["weights"], alone(1), rtol=1e-4, atol=1e-5)

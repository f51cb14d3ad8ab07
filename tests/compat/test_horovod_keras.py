"""`horovod.tensorflow`, `horovod.keras` and `horovod.tensorflow.keras`, in ranks on the driver.

Importing TensorFlow costs seconds, so that a launch does much: one for all that needs TensorFlow, in which
`horovod.keras` is for Keras 3 and `horovod.tensorflow.keras` for tf_keras, and one for each other back end of Keras.
"""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import tritium as tr

pytestmark = [pytest.mark.timeout(300)]
TWO: dict[str, Any] = {"ranks": 2, "on": "driver", "progress": False, "output": "none", "retries": 0}


@pytest.fixture(autouse=True)
def compat() -> Any:
    """Return the module, which makes names importable for the time of a test."""
    return importlib.import_module("tritium.compat")


def trained(keras: Any, hvd: Any, folder: Path, **options: Any) -> dict[str, Any]:
    """Train on this rank's halves of batches, and again a copy on whole batches without Horovod; save and load.

    Returns what a test compares. options : of `DistributedOptimizer`.
    """
    import numpy as np

    rank, size = hvd.rank(), hvd.size()
    x = np.random.default_rng(0).random((32, 3)).astype("float32")
    y = (x @ np.array([[1.0], [-2.0], [0.5]])).astype("float32")
    part = 8 // size
    mine = np.concatenate([np.arange(b + rank * part, b + (rank + 1) * part) for b in range(0, 32, 8)])
    steps = {"shuffle": False, "epochs": 2, "verbose": 0}

    def model() -> Any:
        made = keras.Sequential([keras.layers.Dense(4, activation="tanh"), keras.layers.Dense(1)])
        made.build((None, 3))
        return made

    keras.utils.set_random_seed(rank)  # other weights on each rank
    together, alone = model(), model()
    start = hvd.broadcast_object([np.array(w) for w in together.get_weights()])
    alone.set_weights(start)
    rate = 0.1 / options.get("backward_passes_per_step", 1)  # as their gradients are summed
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(rate, momentum=0.9), **options)
    together.compile(loss="mse", optimizer=optimizer)
    history = together.fit(
        x[mine],
        y[mine],
        batch_size=part // options.get("backward_passes_per_step", 1),
        callbacks=[
            hvd.callbacks.BroadcastGlobalVariablesCallback(0),
            hvd.callbacks.MetricAverageCallback(),
            hvd.callbacks.LearningRateScheduleCallback(rate, 0.5, momentum_correction=False),
        ],
        **steps,
    ).history
    alone.compile(loss="mse", optimizer=keras.optimizers.SGD(0.1, momentum=0.9))
    for epoch in range(2):
        alone.optimizer.learning_rate = 0.1 * 0.5**epoch
        alone.fit(x, y, batch_size=8, **steps | {"epochs": 1})
    weights = [np.array(w) for w in together.get_weights()]
    differs = max(float(np.abs(a - np.array(b)).max()) for a, b in zip(weights, alone.get_weights(), strict=True))
    moved = max(float(np.abs(a - b).max()) for a, b in zip(weights, start, strict=True))

    path = folder / f"{hvd.__name__}{rank}.keras"
    together.save(path)
    plain, again = keras.models.load_model(path), hvd.load_model(path)
    before = [float(np.sum(np.array(w))) for w in again.get_weights()]
    again.fit(x[mine], y[mine], batch_size=part, **steps)
    every = hvd.allgather_object([[np.array(w).tolist() for w in m.get_weights()] for m in (together, again)])
    return {
        "moved": moved > 1e-3,
        "differs from one rank": round(differs, 5),
        "ranks agree": all(one == every[0] for one in every),
        "losses": [hvd.allgather_object(history["loss"])[r] == history["loss"] for r in range(size)],
        "lr": [round(value / rate, 5) for value in history["lr"]],
        "loaded": [isinstance(m.optimizer, type(plain.optimizer)) for m in (plain, again)],
        "name": type(optimizer).__name__,
        "plain is plain": not hasattr(plain.optimizer, "_hvd"),
        "again is distributed": hasattr(again.optimizer, "_hvd"),
        "weights are loaded": before == [float(np.sum(w)) for w in weights],
    }


WELL = {
    "moved": True,
    "differs from one rank": 0.0,
    "ranks agree": True,
    "losses": [True, True],
    "lr": [1.0, 0.5],
    "loaded": [True, True],
    "name": "SGD",
    "plain is plain": True,
    "again is distributed": True,
    "weights are loaded": True,
}


@pytest.mark.imports("torch", "keras")
@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_ranks_train_as_one_on_keras(backend: str, tmp_path: Path) -> None:
    def train() -> Any:
        import horovod.keras as hvd
        import keras
        import numpy as np

        hvd.init()
        found = trained(keras, hvd, tmp_path)
        passes = trained(keras, hvd, tmp_path, backward_passes_per_step=2)
        half = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), compression=hvd.Compression.fp16)
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, kernel_initializer="ones")])
        model.compile(loss="mse", optimizer=half)
        model.train_on_batch(keras.ops.ones((2, 2)), keras.ops.full((2, 1), float(hvd.rank())))
        ops = [
            hvd.allreduce(keras.ops.ones(2) * hvd.rank(), op=hvd.Sum),
            hvd.allgather(keras.ops.ones((1 + hvd.rank(), 1))),
            hvd.broadcast(keras.ops.ones(1) * hvd.rank(), 1),
        ]
        hvd.shutdown()
        shown = [keras.ops.convert_to_numpy(value).tolist() for value in ops]
        return (
            found,
            passes,
            [np.round(w.astype(float), 3).tolist() for w in model.get_weights()],
            shown,
            "tritium_compat.horovod.tensorflow" in sys.modules,
        )

    for found, passes, weights, shown, has_tensorflow in tr.launch(train, env={"KERAS_BACKEND": backend}, **TWO):
        assert found == WELL
        assert passes == WELL
        assert weights == [[[0.7], [0.7]], [-0.3]]  # the mean of the gradients 4 and 2
        assert shown == [[1.0, 1.0], [[1.0]] * 3, [1.0]]
        assert not has_tensorflow


@pytest.mark.imports("torch", "tensorflow", "tf_keras", "keras")
def test_tensorflow(tmp_path: Path) -> None:
    def everything() -> Any:
        import horovod.keras as of_keras
        import horovod.tensorflow as hvd
        import horovod.tensorflow.keras as of_tf_keras
        import keras
        import tensorflow as tf

        hvd.init()
        r = hvd.rank()
        found = {
            "collectives": _collectives(tf, hvd, r),
            "gradients": _gradients(tf, hvd, r),
            "errors": _errors(tf, hvd, r),
            "keras 3": trained(keras, of_keras, tmp_path),
            "keras 3, two passes": trained(keras, of_keras, tmp_path, backward_passes_per_step=2),
            "tf_keras": trained(tf.keras, of_tf_keras, tmp_path),
            "tf_keras, two passes": trained(tf.keras, of_tf_keras, tmp_path, backward_passes_per_step=2),
            "tf_keras is another": tf.keras.__name__,
            "one infinite": _infinite(keras, of_keras),
            "elastic": _elastic(tf, hvd, r),
        }
        hvd.shutdown()
        return found

    env = {"KERAS_BACKEND": "tensorflow", "TF_USE_LEGACY_KERAS": "1"}
    first, second = tr.launch(everything, env=env, **TWO)
    for found in (first, second):
        for kind in ("keras 3", "keras 3, two passes", "tf_keras", "tf_keras, two passes"):
            assert found[kind] == WELL, kind
        assert "tf_keras" in found["tf_keras is another"]
        eager, graph = found["collectives"]
        assert eager == graph
        assert eager[:4] == [[1.0, 1.0], [0.5, 0.5], [[0.0], [1.0], [1.0]], [1.0]]
        assert eager[6:] == [[[0.0, 0.5, 1.0], [0, 1, 0]], [0, 2], [1.0, 1.0]]
        assert found["gradients"]["scales"] == [[3.0], [2.0], [[3.0]], [1.5]]
        assert found["gradients"]["joined"] == 1
        for error, says in zip(found["errors"], ERRORS, strict=True):
            assert says in error
        assert found["one infinite"] == [True, [[1.0]]]
        assert found["elastic"] == [[0, [0.0]], [1, [1.0]], [5.0, 7]]
    assert first["collectives"][0][4:6] == [[[0.0], [10.0]], [[1.0, 1.0]]]
    assert second["collectives"][0][4:6] == [[[1.0], [11.0]], [[1.0, 1.0]]]


def _collectives(tf: Any, hvd: Any, r: int) -> list[Any]:
    """Return what each collective gives: in eager mode, and in a tf.function."""

    def every(mine: Any) -> list[Any]:
        own = [mine, 0.5 - mine][: 2 - r]
        slices = tf.IndexedSlices(tf.stack(own), tf.constant([0, 1][: 2 - r]), tf.constant([2]))
        summed = hvd.allreduce(slices)
        return [
            hvd.allreduce(tf.stack([mine, mine]), op=hvd.Sum),
            *hvd.grouped_allreduce([tf.stack([mine, mine])]),
            hvd.allgather(tf.fill([1 + r, 1], mine)),
            hvd.broadcast(tf.stack([mine]), 1),
            hvd.alltoall(tf.constant([[0.0], [1.0]]) + 10 * mine),
            hvd.reducescatter(tf.fill([2, 2], mine), op=hvd.Sum),
            [tf.sort(summed.values * 2), summed.indices],
            [hvd.rank_op() - r, hvd.size_op()],
            hvd.allreduce(tf.cast(tf.stack([mine, mine]), tf.bfloat16), op=hvd.Max),
        ]

    numbers = tf.nest.map_structure
    shown = []
    for call in (every, tf.function(every)):
        found = call(tf.constant(float(r)))
        shown.append(numbers(lambda value: tf.cast(value, tf.float64).numpy().tolist(), found))
    return shown


def _gradients(tf: Any, hvd: Any, r: int) -> dict[str, Any]:
    """Return gradients of a loss that is 2 and 4 times a variable on the two ranks."""
    v, w = tf.Variable([float(r)]), tf.Variable([[1.0]])
    hvd.broadcast_variables([v], root_rank=1)
    table = tf.Variable([[1.0]])

    @tf.function
    def step() -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(v * (2.0 + 2 * r)) + tf.reduce_sum(tf.gather(table, [0])) * (2.0 + 2 * r)
        tape = hvd.DistributedGradientTape(tape)
        return tape.gradient(loss, [v, table, w])

    dense, sparse, none = step()
    with tf.GradientTape() as tape:
        loss = v * (2.0 + 2 * r)
    local = hvd.DistributedGradientTape(tape)
    local.register_local_source(v)
    own = local.gradient(loss, v)
    sums = [hvd.allreduce(tf.ones(1), op=hvd.Sum) for _ in range(1 + r)]
    last = hvd.join()
    assert none is None
    assert [s.numpy().tolist() for s in sums] == [[2.0], [1.0]][: 1 + r]
    return {
        "scales": [
            dense.numpy().tolist(),
            [float(2 / (1 + r) * own.numpy()[0])],
            tf.convert_to_tensor(sparse).numpy().tolist(),
            (v + 0.5).numpy().tolist(),
        ],
        "joined": int(last),
    }


ERRORS = [
    "'shapes' differs between ranks: rank 0: float32 of shape (1,) on cpu",
    "'types' differs between ranks: rank 0: int64 of shape (2,)",
    "rank 0 waits for allreduce 'a'; rank 1 waits for allreduce 'b'",
    "allreduce 'DistributedGradientTape' differs between ranks",
    "can't be compiled by XLA",
    "op=hvd.Adasum is not there for gradients",
]


def _errors(tf: Any, hvd: Any, r: int) -> list[str]:
    """Return what ranks are told that do not call the same, or what is not there."""

    def graph() -> None:
        tf.function(lambda: hvd.allreduce(tf.ones(1), name="ab"[r]))()

    def tape() -> None:
        v = tf.Variable(tf.ones(2 + r))
        with tf.GradientTape() as own:
            loss = tf.reduce_sum(v)
        hvd.DistributedGradientTape(own).gradient(loss, [v])

    calls = [
        (lambda: hvd.allreduce(tf.ones(1 + r), name="shapes"), hvd.HorovodInternalError),
        (lambda: hvd.broadcast(tf.ones(2, (tf.int64, tf.int32)[r]), 0, "types"), tf.errors.FailedPreconditionError),
        (graph, tf.errors.UnknownError),
        (tape, hvd.HorovodInternalError),
        (lambda: tf.function(lambda: hvd.allreduce(tf.ones(1)), jit_compile=True)(), NotImplementedError),
        (lambda: hvd.DistributedGradientTape(tf.GradientTape(), op=hvd.Adasum), ValueError),
    ]
    told = []
    for call, kind in calls:
        with pytest.raises(kind) as caught:
            call()
        told.append(str(caught.value))
    assert hvd.allreduce(tf.ones(1), op=hvd.Sum).numpy().tolist() == [2.0]  # the ranks are still connected
    return told


def _elastic(tf: Any, hvd: Any, r: int) -> list[Any]:
    """Return what a function sees that is called again after a collective in a tf.function has failed; and the end."""
    variable = tf.Variable([float(r)])
    seen: list[Any] = []

    @hvd.elastic.run
    def train(state: Any) -> None:
        seen.append([state.batch, variable.numpy().tolist()])
        variable.assign([1.0])
        state.batch = 1
        state.commit()
        variable.assign([7.0])
        state.batch = 9
        if len(seen) == 1:
            tf.function(lambda: hvd.allreduce(tf.ones(1 + r)))()
        variable.assign([5.0])
        state.batch = 7

    state = hvd.elastic.TensorFlowState([variable], batch=3 * r)
    train(state)
    return [*seen, [*variable.numpy().tolist(), state.batch]]


def _infinite(keras: Any, hvd: Any) -> Any:
    """Return whether a model has a LossScaleOptimizer, and its weights after a step with an infinite loss on rank 1."""
    import numpy as np

    keras.mixed_precision.set_global_policy("mixed_float16")
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")])
    model.compile(loss="mse", optimizer=hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)))
    model.train_on_batch(np.full((1, 1), [1.0, np.inf][hvd.rank()]), np.ones((1, 1)))
    keras.mixed_precision.set_global_policy("float32")
    scaled = isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
    return [scaled, model.get_weights()[0].tolist()]


@pytest.mark.imports("torch", "keras")
def test_a_killed_rank_costs_what_was_not_committed(tmp_path: Path) -> None:
    def train() -> Any:
        import horovod.keras as hvd
        import keras
        import numpy as np

        hvd.init()
        keras.utils.set_random_seed(hvd.rank())
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile(loss="mse", optimizer=hvd.DistributedOptimizer(keras.optimizers.Adam(0.1)))
        x, y = np.ones((4, 2), "float32"), np.ones((4, 1), "float32")
        model.train_on_batch(x, y)

        class Dies(keras.callbacks.Callback):  # type: ignore[misc]
            def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
                if state.epoch == 2 and hvd.rank() == 1 and not (tmp_path / "died").exists():
                    tr.world().checkpoint.wait()
                    (tmp_path / "died").touch()
                    os.kill(os.getpid(), signal.SIGKILL)

        state = hvd.elastic.KerasState(model, epoch=0, batch=0)
        resets: list[Any] = []
        state.register_reset_callbacks([lambda: resets.append([state.epoch, int(model.optimizer.iterations.numpy())])])

        @hvd.elastic.run
        def fit(state: Any) -> None:
            callbacks = [
                hvd.elastic.UpdateEpochStateCallback(state),
                hvd.elastic.UpdateBatchStateCallback(state),
                hvd.elastic.CommitStateCallback(state, batches_per_commit=2),
                Dies(),
            ]
            state.model.fit(x, y, batch_size=2, epochs=4 - state.epoch, callbacks=callbacks, verbose=0)

        fit(state)
        return (
            state.epoch,
            state.batch,
            resets,
            int(model.optimizer.iterations.numpy()),
            hvd.allgather_object([w.tolist() for w in model.get_weights()]),
        )

    env = {"KERAS_BACKEND": "torch", "TRITIUM_COMMIT_SECONDS": "0"}
    for epoch, batch, resets, steps, weights in tr.launch(
        train, env=env, run_dir=str(tmp_path / "run"), **TWO | {"retries": 1}
    ):
        assert (epoch, batch, steps) == (4, 0, 9)  # one step before, and two in each of four epochs
        assert resets == [[2, 5]]
        assert weights[0] == weights[1]


@pytest.mark.imports("torch", "keras")
def test_log_callback_shows_metrics_on_the_driver(
    compat: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def main() -> None:
        import horovod.keras as hvd
        import keras
        import numpy as np
        from sparkdl.horovod.tensorflow.keras import LogCallback

        hvd.init()
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, kernel_initializer="zeros")])
        model.compile(loss="mse", optimizer=hvd.DistributedOptimizer(keras.optimizers.SGD(0.0)))
        model.fit(np.ones((2, 1)), np.full((2, 1), 2.0), verbose=0, callbacks=[LogCallback(per_batch_log=True)])

    monkeypatch.setenv("KERAS_BACKEND", "torch")
    compat.HorovodRunner(np=-1).run(main)
    out = "".join(capfd.readouterr())
    assert "Epoch 1, batch 1: loss: 4" in out
    assert "Epoch 1: loss: 4" in out


def test_without_torch_the_error_says_what_to_install() -> None:
    code = """
import sys

class Finder:
    def find_spec(self, name, path, target=None):
        if name == "torch":
            raise ModuleNotFoundError("No module named 'torch'")

sys.meta_path.insert(0, Finder())
try:
    import tritium.compat.horovod.keras
except ModuleNotFoundError as error:
    print(error)
"""
    env = os.environ | {"KERAS_BACKEND": "jax"}
    out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, env=env, timeout=60)
    assert "Tritium's Horovod does its collectives by PyTorch, which is not installed" in out.stdout

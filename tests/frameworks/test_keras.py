"""`framework="keras"`: `fit` trains one model on the rows of all ranks, on each back end."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import tritium as tr
from tritium.errors import BadSetting, Stalled, WrongVersion

IDS = np.arange(255)
X = np.stack([np.cos(IDS * (i + 1)) for i in range(4)], axis=1)
Y = 2 * np.cos(IDS) - np.cos(IDS * 3) + 0.5
ROWS = pd.DataFrame({"x": list(X.astype("float32")), "y": Y.astype("float32")})


def run(fn: Any, backend: str | None = "torch", **settings: Any) -> list[Any]:
    quiet = {"ranks": 2, "on": "driver", "progress": False, "output": "none", "data": {"train": ROWS}, "retries": 0}
    return tr.launch(fn, **{**quiet, "framework": tr.Keras(backend=backend), **settings})


def linear() -> Any:
    import keras

    model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1)])
    model.set_weights([np.zeros((4, 1)), np.zeros(1)])
    model.compile(keras.optimizers.SGD(0.1, momentum=0.5), "mse")
    return model


TWO_DEVICES = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}


@pytest.mark.parametrize(
    ("backend", "env"),
    [("torch", {}), ("jax", {}), ("tensorflow", {}), pytest.param("jax", TWO_DEVICES, id="jax on two devices a rank")],
)
def test_fit_is_one_training_of_all_ranks(backend: str, env: dict[str, str]) -> None:
    def train() -> dict[str, Any]:
        import keras

        world = tr.world()
        rows, model = world.shard("train").keras(batch_size=50, x="x", y="y"), linear()
        loss = model.fit(rows, epochs=2, verbose=0).history["loss"]
        weights = np.concatenate([each.ravel() for each in model.get_weights()]).tolist()
        taken = []
        for epoch in range(2):
            rows.set_epoch(epoch)
            taken += [rows[step] for step in range(len(rows))]
        keras.utils.set_random_seed(world.rank)  # other weights and other validation rows: they must agree all the same
        late = keras.Sequential([keras.layers.Dense(8, "relu"), keras.layers.Dropout(0.1), keras.layers.Dense(1)])
        late.compile(keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.01)), "mse", metrics=["mae"])
        own = X[world.rank :: 4], Y[world.rank :: 4]
        stop = keras.callbacks.EarlyStopping(patience=1, min_delta=0.1)
        history = late.fit(
            own[0][:60], own[1][:60], batch_size=20, epochs=30, validation_data=own, callbacks=stop, verbose=0
        )
        late.train_on_batch(own[0][:10], own[1][:10])
        if world.rank == 1:  # one rank alone predicts
            assert late.predict(own[0], verbose=0).shape == (len(own[0]), 1)
        if keras.backend.backend() == "jax":
            import jax

            assert jax.local_device_count() == (2 if "XLA_FLAGS" in os.environ else 1)
        return {
            "weights": weights,
            "taken": taken,
            "loss": loss,
            "report": [(e["epoch"], e["used"]) for e in world.shard("train").report()],
            "history": history.history,
            "late": [np.asarray(each) for each in late.get_weights()],
        }

    one, other = run(train, backend, env=env)
    w, speed = np.zeros(5), np.zeros(5)
    for mine, theirs in zip(one["taken"], other["taken"], strict=True):
        real = [(x[weights > 0], y[weights > 0]) for x, y, weights in (mine, theirs)]
        assert len(mine[0]) == len(theirs[0])
        x, y = (np.concatenate([each[n] for each in real]) for n in range(2))
        x = np.concatenate([x, np.ones((len(x), 1))], axis=1)
        speed = 0.5 * speed - 0.1 * 2 * x.T @ (x @ w - y) / len(y)
        w += speed
    np.testing.assert_allclose(one["weights"], w, rtol=1e-4, atol=1e-5)
    assert one["weights"] == other["weights"]
    assert one["loss"] == other["loss"]
    assert one["report"] == [(0, 128), (1, 128)]
    assert other["report"] == [(0, 127), (1, 127)]
    assert one["history"] == other["history"]
    assert len(one["history"]["val_mae"]) < 30
    assert all((a == b).all() for a, b in zip(one["late"], other["late"], strict=True))


def test_what_would_not_be_one_training_is_refused_on_every_rank() -> None:
    def train() -> None:
        import keras

        rank = tr.world().rank
        rows = 40 if rank else 60
        with pytest.raises(BadSetting, match="steps of an epoch of rank 0 and rank 1 differ: 3 and 2"):
            linear().fit(X[:rows], Y[:rows], batch_size=20, verbose=0)
        model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(2 + rank), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        with pytest.raises(BadSetting, match=r"The models of rank 0 and rank 1 differ: .*4, 2.* and .*4, 3"):
            model.fit(X, Y, verbose=0)

    run(train)


def test_batches_of_different_sizes_are_refused_on_jax() -> None:
    def train() -> None:
        rows = 39 if tr.world().rank else 40
        linear().fit(X[:rows], Y[:rows], batch_size=20, verbose=0)

    with pytest.raises(BadSetting, match="batches of step 1 have 20 rows on rank 0 and 19 on rank 1"):
        run(train, "jax")


def test_between_steps_on_jax_values_are_a_ranks_own() -> None:
    """So that what a rank computes of them is its own, too, and an evaluation is compiled once, not twice."""

    def train() -> tuple[list[str], int]:
        import jax
        import keras

        found, compiled = [], list[str]()

        def on_duration(event: str, seconds: float, fun_name: str = "", **_: Any) -> None:
            if "backend_compile" in event:
                compiled.append(fun_name)

        jax.monitoring.register_event_duration_secs_listener(on_duration)

        def look(*_: Any) -> None:
            variables = [*model.variables, *model.optimizer.variables, *model.metrics_variables]
            found.extend(v.path for v in variables if not v.value.is_fully_addressable)

        callback = keras.callbacks.LambdaCallback(on_epoch_end=look, on_train_end=look)
        model = keras.Sequential([keras.layers.Input((4,)), keras.layers.BatchNormalization(), keras.layers.Dense(1)])
        model.compile("adam", "mse", metrics=["mae"])
        model.fit(X[:40], Y[:40], batch_size=20, epochs=2, verbose=0, callbacks=[callback])
        model.train_on_batch(X[:20], Y[:20])
        look()
        model.evaluate(X[:60], Y[:60], batch_size=20, verbose=0)
        return found, sum("test_step" in name for name in compiled)

    assert run(train, "jax") == [([], 1), ([], 1)]


@pytest.mark.parametrize("means", [1, 2])
def test_a_step_on_jax_may_average_gradients_more_than_once(means: int) -> None:
    """Once, they are in memory that the ranks of a host share; more often, they go through JAX's collectives."""

    def train() -> tuple[list[float], bool]:
        import jax
        import keras

        class Descent(keras.Model):  # type: ignore[misc]
            def train_step(self, state: Any, data: Any) -> tuple[dict[str, Any], Any]:
                trained, others, optimizer, metrics = state
                x, y = data

                def loss(values: Any) -> Any:
                    return ((self.stateless_call(values, others, x, training=True)[0][:, 0] - y) ** 2).mean()

                for _ in range(means):
                    trained, optimizer = self.optimizer.stateless_apply(optimizer, jax.grad(loss)(trained), trained)
                return {"loss": loss(trained)}, (trained, others, optimizer, metrics)

        rank = tr.world().rank
        inputs = keras.layers.Input((4,))
        model = Descent(inputs, keras.layers.Dense(1, kernel_initializer="zeros")(inputs))
        model.compile(keras.optimizers.SGD(0.1), "mse")
        own = slice(100 * rank, 100 * rank + 100)
        model.fit(X[own], Y[own], batch_size=50, epochs=2, shuffle=False, verbose=0)
        with open("/proc/self/maps") as maps:
            shared = "tritium-means" in maps.read()
        return np.concatenate([each.ravel() for each in model.get_weights()]).tolist(), shared

    one, other = run(train, "jax")
    assert one == other
    w = np.zeros(5)
    for step in [0, 50, 0, 50]:
        rows = [*range(step, step + 50), *range(100 + step, 150 + step)]
        x = np.concatenate([X[rows], np.ones((100, 1))], axis=1)
        for _ in range(means):
            w -= 0.1 * 2 * x.T @ (x @ w - Y[rows]) / len(rows)
    np.testing.assert_allclose(one[0], w, rtol=1e-4, atol=1e-5)
    assert one[1] == (means == 1)


def test_a_rank_that_leaves_fit_ends_that_of_the_others_on_jax() -> None:
    def train() -> str:
        import keras

        class Leaves(keras.callbacks.Callback):  # type: ignore[misc]
            def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
                if batch == 2 and tr.world().rank == 1:
                    raise InterruptedError("rank 1 leaves")

        with pytest.raises(Exception, match="rank") as caught:
            linear().fit(X, Y, batch_size=10, verbose=0, callbacks=[Leaves()])
        return str(caught.value)

    of_rank_0, of_rank_1 = run(train, "jax")
    assert "The connection of rank 0 to another rank ended while they averaged gradients" in of_rank_0
    assert of_rank_1 == "rank 1 leaves"


@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_a_rank_that_takes_fewer_steps_is_what_the_error_of_the_other_tells(backend: str) -> None:
    def train() -> None:
        linear().fit(X, Y, epochs=2 - tr.world().rank, verbose=0)

    with pytest.raises(Stalled, match=r"Rank 1 on \S+ is not where the others wait: its function has re") as caught:
        run(train, backend)
    assert "\nConnectionResetError: The connection of rank 0 to another rank ended" in str(caught.value)
    assert "INTERNAL" not in str(caught.value)  # nor the stack of the callback
    assert "in train\n" in str(caught.value)


def test_batch_normalization_on_jax_is_over_the_rows_of_all_ranks_and_its_gradients_too() -> None:
    def train() -> list[Any]:
        import jax
        import keras

        world, draw, layers = tr.world(), np.random.default_rng(0), keras.layers
        x = (100 + 3 * draw.normal(size=(32, 3, 4))).astype("float32")
        x[draw.random((32, 3)) < 0.4] = 0  # masked: ranks have different numbers of steps that count
        y = draw.normal(size=(32, 1)).astype("float32")
        keras.utils.set_random_seed(0)
        norm = layers.BatchNormalization(momentum=0.0)
        stack = [layers.Masking(), norm, layers.GlobalAveragePooling1D(), layers.Dense(5), layers.BatchNormalization()]
        model = keras.Sequential([layers.Input((3, 4)), *stack, layers.Dense(1)])
        model.compile(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(1.0), initial_scale=8.0), "mse")
        trained = [v.value for v in model.trainable_variables]
        others = [v.value for v in model.non_trainable_variables]

        def loss(values: Any) -> Any:
            return ((model.stateless_call(values, others, x, training=True)[0] - y) ** 2).mean()

        gradients = jax.jit(jax.grad(loss))(trained)
        own = slice(16 * world.rank, 16 * world.rank + 16)
        model.fit(x[own], y[own], batch_size=16, verbose=0)
        moments = [np.asarray(v.value) for v in (norm.moving_mean, norm.moving_variance)]
        for value, before, gradient in zip(model.trainable_variables, trained, gradients, strict=True):
            np.testing.assert_allclose(value.value, before - gradient, rtol=1e-4, atol=1e-5)
        rows = x[x.any(-1)]
        np.testing.assert_allclose(moments, [rows.mean(0), rows.var(0)], rtol=1e-4)
        after = [np.asarray(v.value) for v in model.trainable_variables]
        model.fit(x[own], y[own] + (np.inf if world.rank else 0), batch_size=16, verbose=0)
        assert float(model.optimizer.dynamic_scale.value) == 4.0, "no rank's update is made where one's is infinite"
        assert all((v.value == value).all() for v, value in zip(model.trainable_variables, after, strict=True))
        return [each.tolist() for each in model.get_weights()]

    one, other = run(train, "jax")
    assert one == other


def test_xla_is_refused_on_tensorflow() -> None:
    def train() -> None:
        model = linear()
        model.compile("sgd", "mse", jit_compile=True)
        model.fit(X, Y, verbose=0)

    with pytest.raises(BadSetting, match="jit_compile=True"):
        run(train, "tensorflow")


def test_steps_that_are_not_to_be_compiled_are_compiled_on_jax_or_refused() -> None:
    """Outside jit, JAX traces and compiles the step of several ranks at each step."""

    def train() -> int:
        import keras

        traced = []

        class Traced(keras.layers.Dense):
            def call(self, inputs: Any) -> Any:
                traced.append(1)
                return super().call(inputs)

        model = keras.Sequential([keras.layers.Input((4,)), Traced(1)])
        model.compile("sgd", "mse", jit_compile=False)
        model.fit(X, Y, batch_size=4, epochs=1, verbose=0)
        first = len(traced)
        model.fit(X, Y, batch_size=4, epochs=3, verbose=0)
        model.compile("sgd", "mse", run_eagerly=True)
        with pytest.raises(BadSetting, match=r"run_eagerly=True can't train on several ranks .*ranks=1"):
            model.fit(X, Y, batch_size=4, verbose=0)
        return len(traced) - first

    assert max(run(train, "jax")) < 3, "of 192 steps none is traced"


def test_a_back_end_that_is_missing_is_said_before_the_function_is_called(tmp_path: Path) -> None:
    def train() -> None:
        (tmp_path / "called").touch()

    hidden = tmp_path / "hidden" / "jax"
    hidden.mkdir(parents=True)
    hidden.joinpath("__init__.py").write_text("raise ModuleNotFoundError(\"No module named 'jax'\", name='jax')")
    with pytest.raises(WrongVersion, match=r"Keras can't be imported on jax .* pip install jax"):
        run(train, "jax", env={"PYTHONPATH": str(hidden.parent)})
    with pytest.raises(WrongVersion, match="its 'numpy' back end"):
        run(train, None, env={"KERAS_BACKEND": "numpy"})
    with pytest.raises(BadSetting, match=r"backend='torhc' is no back end of Keras.* 'torch'"):
        run(train, "torhc")
    assert not (tmp_path / "called").exists()


def test_columns_of_a_dataset_in_a_world_of_one() -> None:
    def train() -> Any:
        shard = tr.world().shard("train")
        with pytest.raises(BadSetting, match=r"no column 'z'"):
            shard.keras(batch_size=4, x="z")
        with pytest.raises(BadSetting, match=r"keras\(\) has no workers=2. Rows are mapped into memory"):
            shard.keras(batch_size=4, x="x", workers=2)
        with pytest.raises(BadSetting, match=r"keras\(\) has no shufle=True. Did you mean 'shuffle'"):
            shard.keras(batch_size=4, x="x", shufle=True)
        rows = shard.keras(batch_size=4, x={"a": "x", "b": "w"}, y=["y"], sample_weight="w", remainder="drop", seed=3)
        x, y, weights = rows[0]
        (alone,) = shard.keras(batch_size=4, x="x")[0]
        loss = linear().fit(shard.keras(batch_size=5, x="x", y="y"), epochs=2, verbose=0).history["loss"]
        assert loss[1] < loss[0]
        return len(rows), {n: v.shape for n, v in x.items()}, [v.shape for v in y], weights.tolist(), alone.shape

    data = ROWS[:10].assign(w=2.0)
    [found] = run(train, ranks=1, data={"train": data})
    assert found == (2, {"a": (4, 4), "b": (4,)}, [(4,)], [2.0] * 4, (4, 4))


def test_the_trace_has_the_parts_of_a_step_on_torch(tmp_path: Path) -> None:
    def train() -> None:
        linear().fit(tr.world().shard("train").keras(batch_size=8, x="x", y="y"), epochs=2, verbose=0)

    run(train, trace=True, run_dir=str(tmp_path))
    text = next(tmp_path.rglob("events.jsonl")).read_text()
    told = next(json.loads(line) for line in text.splitlines() if '"trace"' in line and '"rank": 0' in line)
    assert told["steps"] >= 2 * 16  # and the batch by which Keras builds the loss
    for section in ("wait for data", "forward", "backward", "communicate", "optimizer"):
        assert told["seconds"][section] > 0, section


def chosen_for_torch() -> str | None:
    return os.environ.get("KERAS_TORCH_DEVICE")


def chosen_for_jax() -> str | None:
    import jax

    return str(jax.config.jax_platforms)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(("backend", "chosen"), [("torch", chosen_for_torch), ("jax", chosen_for_jax)])
def test_without_gpus_it_computes_on_the_cpu(ranks: int, backend: str, chosen: Any) -> None:
    """By itself Keras takes a GPU of the machine, though Spark gave the rank none."""
    assert run(chosen, backend, ranks=ranks) == ["cpu"] * ranks


@pytest.mark.parametrize(
    ("backend", "chosen", "own"),
    [
        ("torch", chosen_for_torch, {"KERAS_TORCH_DEVICE": "cpu:0"}),
        ("jax", chosen_for_jax, {"JAX_PLATFORMS": "cpu,"}),
    ],
)
def test_a_device_that_the_user_has_set_stays(backend: str, chosen: Any, own: dict[str, str]) -> None:
    assert run(chosen, backend, ranks=1, env=own) == list(own.values())

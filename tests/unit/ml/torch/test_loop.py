"""The training loop on 1, 2 and 3 ranks against a plain PyTorch loop; one gang of each size trains every case."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import tritium as tr
from tritium.errors import EmptyShard, TrainingDiverged, TritiumError
from tritium.gang.driver import launch
from tritium.gang.rank import world as worlds
from tritium.ml import Callback, EarlyStopping, TorchSettings, TrainState, fit
from tritium.ml.fitting import prepare
from tritium.ml.torch.backend import TorchBackend
from tritium.ml.torch.loop import train
from tritium.ml.torch.schedule import is_per_step

SIZES = (1, 2, 3)
MARK = 50.0
# The first test of each size trains for all.
pytestmark = [pytest.mark.processes, pytest.mark.timeout(400)]


def mlp() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1))


def classifier() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3))


def sgd(p: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(p, 0.02, momentum=0.8)


def adam(p: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(p, 3e-3)


def table(rows: int = 101) -> pa.Table:
    random = np.random.default_rng(rows)
    x = random.normal(size=(rows, 5))
    y = np.sin(x[:, 0]) + x[:, 1] * x[:, 2] + 0.1 * random.normal(size=rows)
    columns = {f"x{i}": x[:, i] for i in range(5)} | {"y": y, "w": random.uniform(0.1, 3, rows)}
    columns |= {"cls": np.digitize(y, [-0.5, 0.5]), "held": random.uniform(size=rows) < 0.3}
    tokens = np.where(random.uniform(size=(rows, 2)) < 0.4, -100, random.integers(0, 3, (rows, 2)))
    columns["tokens"] = pa.FixedSizeListArray.from_arrays(pa.array(tokens.reshape(-1)), 2)
    columns["few"] = np.isin(np.arange(rows), [4, 10])  # both on one rank, of 2 and of 3
    return pa.table(columns)


def tagger() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(4, 6), nn.Unflatten(1, (3, 2)))


def regression(**changes: Any) -> TorchSettings:
    base = TorchSettings(
        model=mlp,
        loss=nn.MSELoss(),
        optimizer=sgd,
        feature_cols=[f"x{i}" for i in range(5)],
        label_cols=["y"],
        batch_size=8,
        epochs=3,
        seed=5,
        checkpoint_every=None,  # the trainings of a launch share a run directory
        verbose=False,
    )
    return dataclasses.replace(base, **changes)


def classification(**changes: Any) -> TorchSettings:
    base = regression(
        model=classifier,
        loss=nn.CrossEntropyLoss(),
        optimizer=adam,
        feature_cols=["x0", "x1", "x2", "x3"],
        label_cols="cls",
        task="classification",
    )
    return dataclasses.replace(base, **changes)


class Recorder(Callback):
    """A callback that keeps its own calls in the history, which the driver returns."""

    def on_train_start(self, state: TrainState) -> None:
        self.calls = [f"start {state.epoch}"]

    def on_epoch_end(self, state: TrainState) -> None:
        self.calls.append(f"epoch {state.epoch}")
        state.history[-1]["calls"] = list(self.calls)
        state.history[-1]["weights"] = [p.detach().clone().tolist() for p in state.module.parameters()]


class StopOnLastRank(Callback):
    """A callback that stops after the second epoch, on one rank only."""

    def on_epoch_end(self, state: TrainState) -> None:
        state.stop = state.epoch == 2 and state.rank == state.size - 1


class Several(nn.Module):
    """A module of two inputs: floats, and integers for an embedding; one parameter is never used."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed, self.last, self.unused = nn.Embedding(3, 4), nn.Linear(6, 1), nn.Linear(2, 2)

    def forward(self, numbers: torch.Tensor, kind: torch.Tensor) -> torch.Tensor:
        return self.last(torch.cat([numbers, self.embed(kind)], 1))


class Normed(nn.Module):
    """A module with buffers and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


class OwnLoss(nn.Module):
    """A module as of other libraries: its loss is a method, which only DDP's own forward would not find."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.net, self.unused = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1)), nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)

    def loss(self, batch: Any) -> torch.Tensor:
        return nn.functional.mse_loss(self(batch["features"]), batch["label"])


def absolute(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    return (output - label).abs().mean()


def own_step(module: Any, batch: Any) -> Any:
    output = module(batch["features"])
    return ((output - batch["label"]) ** 2).mean(), output


def unheard_step(module: Any, batch: Any) -> Any:
    """Return a loss that one row makes NaN, while its gradients stay finite."""
    loss = nn.functional.mse_loss(module(batch["features"]), batch["label"])
    return loss + math.nan if bool((batch["features"][:, 4] > MARK).any()) else loss


def lonely_step(module: Any, batch: Any) -> Any:
    """Return NaN with finite gradients for the one row that is repeated to keep step, as a spread over rows does."""
    output = module(batch["features"])
    off = 0.0 if batch.rows else math.nan
    return ((output - batch["label"]) ** 2).mean() + off, output + off


def rooted_step(module: Any, batch: Any) -> Any:
    """Return a finite loss whose derivative is not: that of a root at zero."""
    output = module(batch["features"])
    return nn.functional.mse_loss(output, batch["label"]) + torch.sqrt(0 * output).mean()


def mean_by_hook(state: str, bucket: Any) -> Any:
    """Exchange a bucket as DDP does without a hook."""
    assert state == "a state"
    work = torch.distributed.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda future: future.value()[0] / torch.distributed.get_world_size())


def rising(epoch: int) -> float:
    """Return a factor that makes the training worse from the third epoch on."""
    return 1.0 if epoch < 2 else -1.0


@functools.cache
def cases() -> dict[str, tuple[TorchSettings, pa.Table]]:
    """Return name → settings and rows. After all others, `null` shows that a process group can be made again."""
    import torchmetrics

    from .own_metrics import Stacked, Worst

    return {
        "even": (regression(), table(96)),
        "pad": (regression(epochs=4), table(101)),
        "pad_short": (regression(), table(25)),
        "classes": (classification(), table(101)),
        "drop": (regression(remainder="drop"), table(101)),
        "repeat": (regression(remainder="repeat"), table(101)),
        "in_order": (regression(shuffle=False), table(50)),
        "weights": (regression(weight_col="w"), table(101)),
        "class_weights": (classification(weight_col="w", loss=nn.functional.cross_entropy), table(101)),
        "class_means": (
            classification(
                loss=nn.CrossEntropyLoss(weight=torch.tensor([0.2, 1.0, 5.0]), label_smoothing=0.1),
                validation="held",
                callbacks=[Recorder()],
            ),
            table(101),
        ),
        "ignored": (
            classification(loss=functools.partial(nn.functional.cross_entropy, ignore_index=2)),
            table(96),  # a step whose labels are all ignored is NaN
        ),
        "tokens": (
            classification(model=tagger, label_cols="tokens", task=None, validation="few", callbacks=[Recorder()]),
            table(101),
        ),
        "accumulate": (regression(gradient_accumulation=3, batch_size=4), table(101)),
        "clip": (regression(clip_grad_norm=0.05), table(101)),
        "per_epoch": (regression(lr_scheduler=lambda o: torch.optim.lr_scheduler.StepLR(o, 1, 0.5)), table(101)),
        "per_step": (
            regression(lr_scheduler=lambda o, steps: torch.optim.lr_scheduler.LinearLR(o, 1.0, 0.1, steps)),
            table(101),
        ),
        "plateau": (
            regression(
                lr_scheduler=lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o, patience=0, threshold=10.0),
                validation="held",
            ),
            table(101),
        ),
        "own_step": (regression(train_step=own_step, loss=None, metrics=[absolute]), table(101)),
        "own_loss": (
            regression(model=OwnLoss, train_step=lambda module, batch: module.loss(batch), loss=None),
            table(101),
        ),
        "own_accumulated": (
            regression(
                model=OwnLoss,
                train_step=lambda module, batch: (module.loss(batch), module(batch["features"])),
                loss=None,
                metrics=[absolute],
                gradient_accumulation=3,
                batch_size=4,
            ),
            table(101),
        ),
        "ddp_options": (
            regression(
                model=Several,
                feature_cols={"numbers": ["x0", "x1"], "kind": "cls"},
                ddp_options={"static_graph": True, "bucket_cap_mb": 1, "gradient_as_bucket_view": False},
            ),
            table(101),
        ),
        "ddp_accumulated": (
            regression(
                gradient_accumulation=3,
                batch_size=4,
                ddp_options={"comm_hook": ("a state", mean_by_hook), "broadcast_buffers": False},
            ),
            table(101),
        ),
        "own_unused": (
            regression(
                model=OwnLoss,
                train_step=lambda module, batch: module.loss(batch),
                loss=None,
                ddp_options={"find_unused_parameters": True},
            ),
            table(101),
        ),
        "one_row": (classification(batch_size=1, epochs=2), table(25)),
        "few": (
            regression(
                validation="few",
                metrics={
                    "mse": torchmetrics.MeanSquaredError(),
                    "worst": Worst(),
                    "stacked": Stacked(),
                    "wrapped": torchmetrics.wrappers.MultioutputWrapper(torchmetrics.MeanSquaredError(), 1),
                    "mae": absolute,
                },
                callbacks=[Recorder()],
            ),
            table(101),
        ),
        "none": (regression(validation="few"), table(4)),
        "held": (
            regression(
                validation="held",
                metrics={"mse": torchmetrics.MeanSquaredError(), "r2": torchmetrics.R2Score(), "mae": absolute},
                callbacks=[Recorder()],
            ),
            table(101),
        ),
        "accuracy": (
            classification(
                validation=0.3, metrics=[torchmetrics.classification.MulticlassAccuracy(3, average="micro")]
            ),
            table(101),
        ),
        "stopped": (regression(callbacks=[StopOnLastRank()], epochs=6), table(40)),
        "early": (
            regression(
                epochs=9,
                early_stopping=EarlyStopping(patience=2),
                optimizer=lambda p: torch.optim.SGD(p, 0.02),
                lr_scheduler=lambda o: torch.optim.lr_scheduler.LambdaLR(o, rising),
                callbacks=[Recorder()],
            ),
            table(101),
        ),
        "inputs": (
            regression(model=Several, feature_cols={"numbers": ["x0", "x1"], "kind": "cls"}, label_cols=["y"]),
            table(101),
        ),
        "buffers": (regression(model=Normed), table(96)),
        "half": (regression(precision="bf16"), table(101)),
        "diverges": (regression(optimizer=lambda p: torch.optim.SGD(p, 1e30), batch_size=2), table(40)),
        "infinite": (
            regression(),
            table(40).set_column(2, "x2", pa.array([math.inf if i == 37 else 1.0 for i in range(40)])),
        ),
        "unheard": (
            regression(train_step=unheard_step, loss=None),
            table(40).set_column(4, "x4", pa.array([MARK + 1 if i == 17 else 1.0 for i in range(40)])),
        ),
        "lonely": (regression(train_step=lonely_step, loss=None, metrics=[absolute]), table(97)),
        "rooted": (regression(train_step=rooted_step, loss=None), table(40)),
        "empty": (regression(), table(0)),
        "no_step": (regression(remainder="drop", batch_size=64), table(40)),
        "null": (regression(epochs=1), table(40)),
    }


@dataclasses.dataclass(frozen=True)
class Renamed:
    """A rank's control whose shards are those of one case."""

    control: Any
    case: str

    def __getattr__(self, name: str) -> Any:
        return getattr(self.control, name)

    def shard(self, name: str) -> Any:
        return self.control.shard(f"{self.case}_{name}")

    def store(self, piece: Any) -> None:
        self.control.store(dataclasses.replace(piece, name=f"{self.case}/{piece.name}"))


def every_case(cases: dict[str, tuple[Any, ...]]) -> dict[str, Any]:
    """Train every case in this rank. Return the results, and the batches taken."""
    world = tr.world()
    found: dict[str, Any] = {}
    for name, (settings, validate, facts) in cases.items():
        own = dataclasses.replace(world, _control=Renamed(world._control, name))
        with worlds.entered(own):
            try:
                trained: Any = train(settings, validate, facts)
                batches = taken(own, settings, settings.rows_per_rank(own.size))
            except TritiumError as error:
                trained, batches = error, None
        world.barrier()
        leftover = torch.distributed.is_initialized()
        found[name] = (trained, batches, leftover)
    return found


def taken(world: Any, settings: TorchSettings, batch_size: int) -> list[list[dict[str, Any]]]:
    """Return the rows that count, by step, of every epoch."""
    epochs = world.shard("train").epochs(
        settings.epochs,
        batch_size=batch_size,
        shuffle=settings.shuffle,
        seed=settings.seed,
        remainder=settings.remainder,
        device=None,
    )
    return [[{name: np.array(batch[name][: batch.rows]) for name in batch} for batch in epoch] for epoch in epochs]


def trained(size: int) -> list[dict[str, Any]]:
    found = gang_of(size)
    if isinstance(found, Exception):
        raise found
    return found


@functools.cache
def gang_of(size: int) -> Any:
    """Return the results of a gang, or its error, computed once."""
    try:
        return started(size)
    except Exception as error:  # noqa: BLE001 - every test that needs this gang raises it
        return error


def started(size: int) -> list[dict[str, Any]]:
    """Run every case in a gang of this size. Return the results of every rank."""
    gang = tr.Gang(ranks=size, on="here" if size == 1 else "driver", framework="torch", progress=False, output="none")
    plans = {name: prepare(TorchBackend(), rows, settings, gang) for name, (settings, rows) in cases().items()}
    run = launch.start(
        every_case,
        gang,
        args=({n: (p.settings, "validation" in p.data, p.facts) for n, p in plans.items()},),
        data={
            f"{name}_{shard}": dataclasses.replace(data, nan="keep") if name == "infinite" else data
            for name, plan in plans.items()
            for shard, data in plan.data.items()
        },
    )
    run_dirs[size] = run.run_dir
    return run.result()


run_dirs: dict[int, str] = {}


def outcome(case: str, size: int) -> dict[str, Any]:
    """Return rank 0's history and shapes."""
    found = trained(size)[0][case][0]
    if isinstance(found, Exception):
        raise found
    return found


def history(case: str, size: int) -> list[dict[str, Any]]:
    return outcome(case, size)["history"]


def steps(case: str, size: int) -> Iterator[list[dict[str, torch.Tensor]]]:
    """Yield, epoch by epoch and step by step, the union of the ranks' batches."""
    for epoch in zip(*(rank[case][1] for rank in trained(size)), strict=True):
        yield [
            {name: torch.from_numpy(np.concatenate([part[name] for part in parts])) for name in parts[0]}
            for parts in zip(*epoch, strict=True)
        ]


def plain_losses(case: str, size: int) -> list[float]:
    """Return the loss curve of a plain loop in one process, over the union of the ranks' batches."""
    settings = cases()[case][0]
    torch.manual_seed(settings.seed)
    module = settings.model()
    optimizer = settings.optimizer(module.parameters())
    loss_of = settings.loss or nn.MSELoss()
    scheduler = None
    curve = []
    for batches in steps(case, size):
        group = settings.gradient_accumulation
        if settings.lr_scheduler is not None and scheduler is None:
            per_step = is_per_step(settings)
            scheduler = settings.lr_scheduler(optimizer, *[len(batches) * settings.epochs] * per_step)
        losses, rows = 0.0, 0
        for start in range(0, len(batches), group):
            together = batches[start : start + group]
            whole = {name: torch.cat([batch[name] for batch in together]) for name in together[0]}
            inputs = {name: whole[name] for name in settings.inputs()}
            output = module(whole["features"]) if len(inputs) == 1 else module(**inputs)
            if settings.weight_col is not None:
                kind = {"MSELoss": nn.functional.mse_loss}.get(type(loss_of).__name__, nn.functional.cross_entropy)
                each = kind(output, whole["label"], reduction="none").reshape(len(output), -1).mean(1)
                loss = (each * whole["weight"]).mean()
            else:
                loss = loss_of(output, whole["label"])
            optimizer.zero_grad()
            loss.backward()
            if settings.clip_grad_norm:
                nn.utils.clip_grad_norm_(module.parameters(), settings.clip_grad_norm)
            optimizer.step()
            if scheduler is not None and per_step:
                scheduler.step()
            losses, rows = losses + loss.item() * len(output), rows + len(output)
        if scheduler is not None and not per_step:
            scheduler.step()
        curve.append(losses / rows)
    return curve


@pytest.mark.imports("torchmetrics")
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("case", "model", "held"), [("class_means", classifier, "held"), ("tokens", tagger, "few")])
def test_a_loss_over_weights_is_validated_as_one_batch(case: str, model: Any, held: str, size: int) -> None:
    rows = table(101).filter(pa.compute.field(held))
    x = torch.tensor(rows.select(["x0", "x1", "x2", "x3"]).to_pandas().to_numpy("float32"))
    label = torch.tensor(rows["cls" if case == "class_means" else "tokens"].to_pylist())
    module, loss = model(), cases()[case][0].loss
    for entry in history(case, size):
        for parameter, weights in zip(module.parameters(), entry["weights"], strict=True):
            parameter.data = torch.tensor(weights)
        assert entry["validation_loss"] == pytest.approx(loss(module(x), label).item(), rel=1e-5)


@pytest.mark.imports("torchmetrics")
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    "case",
    [
        "even",
        "pad",
        "pad_short",
        "classes",
        "drop",
        "repeat",
        "in_order",
        "weights",
        "class_weights",
        "class_means",
        "ignored",
        "tokens",
        "accumulate",
        "clip",
        "per_epoch",
        "per_step",
        "own_step",
        "own_loss",
        "own_accumulated",
        "ddp_options",
        "ddp_accumulated",
        "own_unused",
        "one_row",
        "inputs",
    ],
)
def test_ranks_learn_what_one_process_learns(case: str, size: int) -> None:
    curve = [entry["loss"] for entry in history(case, size)]
    assert curve == pytest.approx(plain_losses(case, size), rel=1e-5)
    assert len(curve) == cases()[case][0].epochs
    assert curve[-1] < curve[0]


@pytest.mark.parametrize("size", SIZES)
def test_every_row_counts_once_under_pad(size: int) -> None:
    entry = history("pad", size)[0]
    assert entry["rows"] == 101
    assert entry["rows_padded"] == 0
    assert entry["rows_per_second"] == pytest.approx(101 / entry["seconds"])
    padded = history("pad_short", size)[0]
    counts = [len(range(rank, 25, size)) for rank in range(size)]
    most = max(-(-count // 8) for count in counts)
    assert padded["rows_padded"] == sum(most - -(-count // 8) for count in counts)


@pytest.mark.parametrize("size", SIZES)
def test_dropped_and_repeated_rows_show_in_the_history(size: int) -> None:
    counts = [len(range(rank, 101, size)) for rank in range(size)]
    assert history("drop", size)[0]["rows"] == min(counts) // 8 * 8 * size
    assert history("repeat", size)[0]["rows"] == -(-max(counts) // 8) * 8 * size


def test_the_learning_rate_follows_the_scheduler() -> None:
    assert [e["learning_rate"] for e in history("per_epoch", 2)] == pytest.approx([0.02, 0.01, 0.005])
    falling = [e["learning_rate"] for e in history("per_step", 2)]
    assert falling[0] < 0.02
    assert falling[-1] == pytest.approx(0.002)
    # ReduceLROnPlateau is shown the validation loss, which never gets better by the factor that it asks for.
    assert [e["learning_rate"] for e in history("plateau", 2)] == pytest.approx([0.02, 0.002, 0.0002])


def scored(entry: dict[str, Any], rows: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the outputs of the module as it was at the end of an epoch, and the labels of the same rows."""
    module = mlp()
    for parameter, weights in zip(module.parameters(), entry["weights"], strict=True):
        parameter.data = torch.tensor(weights)
    x = torch.tensor(rows[[f"x{i}" for i in range(5)]].to_numpy(), dtype=torch.float32)
    with torch.no_grad():
        return module(x), torch.tensor(rows[["y"]].to_numpy(), dtype=torch.float32)


@pytest.mark.parametrize("size", SIZES)
def test_validation_and_metrics_are_exact_over_all_rows(size: int) -> None:
    rows = cases()["held"][1].to_pandas()
    held = rows[rows["held"]]
    for entry in history("held", size):
        output, y = scored(entry, held)
        squared = (output - y).square().mean().item()
        assert entry["validation_loss"] == pytest.approx(squared, rel=1e-5)
        assert entry["validation_mse"] == pytest.approx(squared, rel=1e-5)
        assert entry["validation_mae"] == pytest.approx((output - y).abs().mean().item(), rel=1e-5)
        assert 1 - entry["validation_r2"] == pytest.approx(squared / y.var(correction=0).item(), rel=1e-5)
        assert entry["mse"] == pytest.approx(entry["loss"], rel=1e-5)
        assert entry["rows"] == len(rows) - len(held)


@pytest.mark.parametrize("size", SIZES)
def test_a_rank_without_rows_to_validate_on_contributes_nothing(size: int) -> None:
    rows = cases()["few"][1].to_pandas()
    for entry in history("few", size):
        output, y = scored(entry, rows[rows["few"]])
        squared = (output - y).square().mean().item()
        assert entry["validation_loss"] == pytest.approx(squared, rel=1e-5)
        assert entry["validation_mse"] == pytest.approx(squared, rel=1e-5)
        assert entry["validation_mae"] == pytest.approx((output - y).abs().mean().item(), rel=1e-5)
        assert entry["validation_worst"] == pytest.approx((output - y).abs().max().item(), rel=1e-5)
        assert entry["validation_stacked"] == pytest.approx(squared, rel=1e-5)
        assert entry["validation_wrapped"] == pytest.approx([squared], rel=1e-5)


@pytest.mark.parametrize("size", SIZES)
def test_no_row_to_validate_on_is_said_before_the_first_step(size: int) -> None:
    error = one_error("none", size, EmptyShard)
    assert "no rows to validate on" in str(error)


def test_metrics_from_a_list_have_the_names_of_their_classes() -> None:
    entry = history("accuracy", 2)[-1]
    assert 0 <= entry["multiclass_accuracy"] <= 1
    assert 0 <= entry["validation_multiclass_accuracy"] <= 1
    assert entry["rows"] == history("accuracy", 1)[-1]["rows"], "the fraction depends on the rows and the seed alone"
    assert 50 < entry["rows"] < 90


def test_a_metric_of_the_own_step_sees_its_output() -> None:
    assert all(0 < entry["absolute"] < 3 for entry in history("own_step", 2))


@pytest.mark.parametrize("size", SIZES)
def test_callbacks_are_called_in_every_epoch_and_any_rank_can_stop(size: int) -> None:
    assert history("held", size)[-1]["calls"] == ["start 0", "epoch 1", "epoch 2", "epoch 3"]
    assert [entry["epoch"] for entry in history("held", size)] == [1, 2, 3], "as the display counts"
    assert len(history("stopped", size)) == 2


@pytest.mark.parametrize("size", SIZES)
def test_early_stopping_stops_all_ranks_and_restores_the_best_weights(size: int) -> None:
    entries = history("early", size)
    losses = [entry["loss"] for entry in entries]
    best = losses.index(min(losses))
    assert len(entries) == best + 3 < 9
    stored = load_file(f"{run_dirs[size]}/early/weights.safetensors")
    names = [name for name, _ in mlp().named_parameters()]
    assert [stored[name].tolist() for name in names] == entries[best]["weights"]


def one_error(case: str, size: int, kind: type[TritiumError]) -> Any:
    """Return the one error that every rank has raised."""
    errors = [rank[case][0] for rank in trained(size)]
    assert {type(error) for error in errors} == {kind}
    assert len({str(error) for error in errors}) == 1
    return errors[0]


def rank_of(case: str, row: int, size: int) -> int:
    """Return the rank of a row, for a table as one source partition: partition + position, modulo the ranks."""
    before = list(cases()).index(case)
    partition = sum(1 + (settings.validation is not None) for settings, _ in list(cases().values())[:before])
    return (partition + row) % size


@pytest.mark.parametrize("size", SIZES)
def test_a_loss_that_is_not_finite_is_one_error_on_every_rank(size: int) -> None:
    error = one_error("diverges", size, TrainingDiverged)
    assert error.epoch == 1
    assert error.step > 1
    assert error.column is None
    assert "learning rate" in str(error)


@pytest.mark.parametrize("size", SIZES)
def test_an_input_that_is_not_finite_is_named(size: int) -> None:
    error = one_error("infinite", size, TrainingDiverged)
    assert error.column == "x2"
    assert error.rank == rank_of("infinite", 37, size)
    assert f"rank {error.rank} of {size}; column 'x2'" in str(error)


@pytest.mark.parametrize("size", SIZES)
def test_a_loss_that_is_not_finite_is_found_when_its_gradients_are(size: int) -> None:
    error = one_error("unheard", size, TrainingDiverged)
    assert (error.epoch, error.column, error.rank) == (1, None, rank_of("unheard", 17, size))
    assert "The loss is NaN or infinite" in str(error)


@pytest.mark.parametrize("size", SIZES)
def test_a_row_that_is_repeated_to_keep_step_counts_for_nothing(size: int) -> None:
    found = history("lonely", size)
    assert all(math.isfinite(entry["loss"]) and math.isfinite(entry["absolute"]) for entry in found)
    assert size == 1 or found[0]["rows_padded"]


@pytest.mark.parametrize("size", SIZES)
def test_gradients_that_are_not_finite_are_found_when_the_loss_is(size: int) -> None:
    error = one_error("rooted", size, TrainingDiverged)
    assert (error.epoch, error.step, error.rank) == (1, 1, 0 if size == 1 else None)
    assert "The norm of the gradients is NaN or infinite" in str(error)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("case", ["empty", "no_step"])
def test_nothing_to_train_on_is_one_error_on_every_rank(case: str, size: int) -> None:
    one_error(case, size, EmptyShard)


@pytest.mark.parametrize("size", SIZES)
def test_other_modules_train_too(size: int) -> None:
    for case in ("buffers", "half", "null"):
        assert all(math.isfinite(entry["loss"]) for entry in history(case, size))
    half, full = history("half", size), history("pad", size)[:3]
    assert [e["loss"] for e in half] == pytest.approx([e["loss"] for e in full], rel=0.05)
    assert half != full


@pytest.mark.parametrize("size", SIZES)
def test_no_process_group_is_left_behind(size: int) -> None:
    assert not any(leftover for rank in trained(size) for _, _, leftover in rank.values())


def test_what_was_seen_makes_the_signature() -> None:
    found = outcome("inputs", 2)
    assert found["inputs"] == {"numbers": ("float32", (2,)), "kind": ("int64", ())}
    assert found["outputs"] == {"prediction": ("float32", (1,))}


class Norms(Callback):
    """A callback that keeps the norm of the first layer's gradient at each optimizer step."""

    def on_train_start(self, state: TrainState) -> None:
        self.norms: list[float] = []
        first = next(state.module.parameters())
        state.optimizer.register_step_pre_hook(lambda *_: self.norms.append(float(first.grad.norm())))

    def on_epoch_end(self, state: TrainState) -> None:
        state.history[-1]["norms"] = list(self.norms)


@pytest.mark.parametrize(
    "where",
    [{"on": "here"}, pytest.param({"on": "driver", "ranks": 2}, marks=pytest.mark.processes)],
)
def test_of_weights_outside_the_optimizer_the_norm_has_the_gradient_of_one_step(where: dict[str, Any]) -> None:
    settings = regression(
        optimizer=lambda p: torch.optim.SGD(list(p)[2:], 0.0),
        clip_grad_norm=1e9,
        batch_size=96,
        epochs=4,
        callbacks=[Norms()],
    )
    model = fit(table(96), settings, **where, progress=False, output="none")
    norms = model.history[-1]["norms"]
    assert norms == pytest.approx([norms[0]] * 4), "weights and rows stay the same, so the gradient does"

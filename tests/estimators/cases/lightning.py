"""`LightningEstimator`: a linear LightningModule."""

from __future__ import annotations

from typing import Any

PACKAGES = ("lightning",)
RTOL = 1e-5


def make() -> Any:
    import lightning
    import torch

    class Linear(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(2, 1)

        def forward(self, features: Any) -> Any:
            return self.linear(features)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            features, label = batch
            return torch.nn.functional.mse_loss(self(features), label)

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), 0.2)

    return Linear()


def estimator(**settings: Any) -> Any:
    from tritium.ml import LightningEstimator

    own = {"model": make, "label_cols": ["y"], "epochs": 8}
    common = {"global_batch_size": 40, "shuffle": False, "checkpoint_every": 1}
    return LightningEstimator(**{**own, **common, **settings})


def classifier(classes: int, **settings: Any) -> Any:
    import torch

    def make_classifier() -> Any:
        linear = make()

        class Classes(type(linear)):  # type: ignore[misc]
            def __init__(self) -> None:
                super().__init__()
                self.linear = torch.nn.Linear(2, classes)

            def training_step(self, batch: Any, batch_idx: int) -> Any:
                features, label = batch
                return torch.nn.functional.cross_entropy(self(features), label)

            def validation_step(self, batch: Any, batch_idx: int) -> None:
                self.log("validation_loss", self.training_step(batch, batch_idx))

        return Classes()

    return estimator(**{"model": make_classifier, "task": "classification", **settings})

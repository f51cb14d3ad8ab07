"""What the settings of all trainings of a torch module have, whoever trains it (any process)."""

from __future__ import annotations

from typing import Any, Protocol


class ModuleSettings(Protocol):
    """The part of `TorchSettings` and `LightningSettings` that a module is made and called by."""

    @property
    def model(self) -> Any: ...
    @property
    def initial_weights(self) -> Any: ...
    @property
    def task(self) -> Any: ...
    @property
    def validation(self) -> Any: ...
    def inputs(self) -> dict[str, str | list[str]]: ...
    def make_module(self) -> Any: ...

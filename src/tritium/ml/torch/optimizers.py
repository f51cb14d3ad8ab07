"""Several optimizers by name, each of which trains parameters of its own (driver, rank)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from tritium.arguments import name_of
from tritium.errors import BadSetting

if TYPE_CHECKING:
    import torch


class Optimizers(Mapping[str, Any]):
    """A mapping from names to optimizers, which also holds all their groups, as one optimizer does."""

    def __init__(self, made: Mapping[str, Any], module: torch.nn.Module) -> None:
        """Raises BadSetting for names that the history has already, and for a parameter of two optimizers."""
        self._made, self._module = dict(made), module
        if not self._made or any(not isinstance(name, str) or name in ("", "validation") for name in self._made):
            raise BadSetting(
                f"optimizer returned a mapping of the names {list(self._made)!r}. Give each optimizer a name, another "
                "one than 'validation': the history has its loss as <name>_loss.",
                setting="optimizer",
            )
        owners: dict[int, str] = {}
        named = {id(parameter): name for name, parameter in module.named_parameters()}
        for name, optimizer in self._made.items():
            for key in held(optimizer):
                if key in owners:
                    raise BadSetting(
                        f"{named.get(key, 'a parameter')!r} is in the optimizers {owners[key]!r} and {name!r}. Give "
                        "each of them parameters of its own: those of another layer.",
                        setting="optimizer",
                    )
                owners[key] = name

    def __getitem__(self, name: str) -> Any:
        return self._made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._made)

    def __len__(self) -> int:
        return len(self._made)

    @property
    def described(self) -> str:
        """The optimizers as a text: `generator: Adam, critic: SGD`."""
        return ", ".join(f"{name}: {name_of(optimizer)}" for name, optimizer in self._made.items())

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of all optimizers, in their order."""
        return [group for optimizer in self._made.values() for group in optimizer.param_groups]

    @contextmanager
    def alone(self, name: str) -> Iterator[None]:
        """Freeze all parameters but those of one optimizer, within the block."""
        own = held(self._made[name])
        others = [p for p in self._module.parameters() if p.requires_grad and id(p) not in own]
        for parameter in others:
            parameter.requires_grad_(False)
        try:
            yield
        finally:
            for parameter in others:
                parameter.requires_grad_(True)

    def add_param_group(self, group: Any) -> None:
        """Raise BadSetting: of a group that a callback has added, it is not known to which optimizer it belongs."""
        raise BadSetting(
            "A callback has added a group to one of several optimizers after an epoch, which can't be put back in a "
            "training that continues. Let it add groups in on_train_start.",
            tensors=len(group["params"]),
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the states by name."""
        return {name: optimizer.state_dict() for name, optimizer in self._made.items()}

    def load_state_dict(self, states: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        for name, optimizer in self._made.items():
            optimizer.load_state_dict(states[name])


def held(optimizer: Any) -> set[int]:
    """Return the ids of the parameters in the groups of an optimizer."""
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}

"""What is known of a loss without calling it: torch's own ones by name (any process)."""

from __future__ import annotations

import functools
import inspect
from typing import Any

from tritium.arguments import name_of

_ONE_SCORE = ("BCEWithLogitsLoss", "BCELoss", "binary_cross_entropy", "binary_cross_entropy_with_logits")
_BY_CLASS = ("CrossEntropyLoss", "NLLLoss", "cross_entropy", "nll_loss", "MultiMarginLoss", "multi_margin_loss")
_OVER_WEIGHTS = ("CrossEntropyLoss", "NLLLoss", "cross_entropy", "nll_loss")
_PROBABILITIES = ("BCELoss", "binary_cross_entropy")


def is_of_torch(loss: Any) -> bool:
    """Return whether `loss` is torch's own; a `functools.partial` of one is not."""
    home = loss.__module__ if inspect.isfunction(loss) else type(loss).__module__
    return str(home).startswith("torch.")


def is_of_one_score(loss: Any) -> bool:
    """Return whether `loss` is torch's own for one score a row against 0 or 1."""
    return _name_in_torch(loss) in _ONE_SCORE


def is_by_class(loss: Any) -> bool:
    """Return whether `loss` is torch's own for class indices against a score for each class."""
    return _name_in_torch(loss) in _BY_CLASS


def is_over_weights(loss: Any) -> bool:
    """Return whether `loss` is torch's own whose mean is over the weights of the labels' classes, not over rows."""
    return _name_in_torch(loss) in _OVER_WEIGHTS and option(loss, "reduction", "mean") == "mean"


def option(loss: Any, name: str, default: Any) -> Any:
    """Return an option of a loss of torch's: an attribute of a module, a keyword of a partial."""
    return loss.keywords.get(name, default) if isinstance(loss, functools.partial) else getattr(loss, name, default)


def _name_in_torch(loss: Any) -> str:
    """Return the name of a loss of torch's, also of a partial of one; "" for any other."""
    loss = loss.func if isinstance(loss, functools.partial) else loss
    return name_of(loss) if is_of_torch(loss) else ""


def gives_probabilities(loss: Any) -> bool:
    """Return whether `loss` is torch's own for probabilities."""
    return _name_in_torch(loss) in _PROBABILITIES

"""Lightning's first Trainer of a process opens sockets for good (for Gloo): once, before a test counts them."""

from __future__ import annotations

import warnings
from importlib.util import find_spec


def settle() -> None:
    """Make a Trainer, where Lightning is installed."""
    if find_spec("lightning") is None:
        return
    import lightning

    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # on a machine with a GPU: that it is not used
        lightning.Trainer(max_epochs=1, accelerator="cpu", devices=1, **quiet)

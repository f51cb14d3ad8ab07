"""`sparkdl.horovod`: `log_to_driver` (rank)."""

from __future__ import annotations

from tritium import world


def log_to_driver(message: str, stacklevel: int = 2) -> None:
    """Show a line on the driver. Raises RuntimeError outside a rank."""
    world().note(str(message))


__all__ = ["log_to_driver"]

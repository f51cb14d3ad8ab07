"""`sparkdl`: `HorovodRunner` (driver)."""

from tritium.compat.sparkdl.runner import HorovodRunner

__all__ = ["HorovodRunner"]

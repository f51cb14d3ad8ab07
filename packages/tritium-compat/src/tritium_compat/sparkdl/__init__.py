"""`sparkdl`: `HorovodRunner` (driver)."""

from tritium_compat.sparkdl.runner import HorovodRunner

__all__ = ["HorovodRunner"]

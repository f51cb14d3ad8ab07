"""A command that starts ranks as `tritium run` does (driver). Imports click."""

from __future__ import annotations

from tritium.cli.run import Pair, start

__all__ = ["Pair", "start"]

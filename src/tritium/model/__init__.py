"""Models with their signatures, and checkpoints, saved, loaded and applied without Spark (any process)."""

from __future__ import annotations

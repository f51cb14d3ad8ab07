"""Models with their signatures, saved, loaded and applied without Spark (any process)."""

from __future__ import annotations

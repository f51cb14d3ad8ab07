"""What training leaves behind: a model with its signature, saved, loaded and applied without Spark (any
process)."""

from __future__ import annotations

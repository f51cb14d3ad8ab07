"""The engines of frameworks whose models can be saved, restored and called (any process)."""

from __future__ import annotations

"""Checkpoints: their files, a save by all ranks together, and whose training one is (any process)."""

from __future__ import annotations

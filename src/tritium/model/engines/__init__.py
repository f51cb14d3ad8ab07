"""The frameworks whose models can be saved, restored and called, each behind the interface `Engine` (any process)."""

from __future__ import annotations

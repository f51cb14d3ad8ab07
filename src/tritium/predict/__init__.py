"""Predictions for a Spark DataFrame, a batch or a stream (driver, and Spark's Python workers)."""

from __future__ import annotations

"""Petastorm's exceptions, by their names (any process)."""

from __future__ import annotations


class NoDataAvailableError(Exception):
    """A shard, or an endless reader, has no rows."""


class PetastormMetadataError(Exception):
    """A data set has no Unischema, or one that can't be read."""


class PetastormMetadataGenerationError(Exception):
    """The metadata of a data set that was written could not be added to it."""


class DecodeFieldError(RuntimeError):
    """A value can't be decoded by the codec of its field."""

"""Imports of frameworks, in ranks and in prediction workers."""

from __future__ import annotations

import gc

import pytest

from tritium.frameworks.at_import import without_collections


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("fails", [True, False])
def test_a_collector_is_left_as_it_was(enabled: bool, fails: bool) -> None:
    before = gc.isenabled()
    try:
        (gc.enable if enabled else gc.disable)()
        try:
            with without_collections():
                assert not gc.isenabled()
                if fails:
                    raise ImportError("no such package")
        except ImportError:
            assert fails
        assert gc.isenabled() == enabled
    finally:
        (gc.enable if before else gc.disable)()

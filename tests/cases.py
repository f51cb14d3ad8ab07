"""The cases of the contract tests (tests/estimators/cases, tests/frameworks/cases): a module for each framework."""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from typing import Any

import pytest


def case_of(folder: str, name: str) -> Any:
    """Return a case's module; skip the test where one of its PACKAGES is not installed.

    INSTALL is the command that brings them, where that is not `make setup`.
    """
    module = importlib.import_module(f"{folder}.cases.{name}")
    for package in module.PACKAGES:  # not imported: that would initialize MPI in this process, for example
        if find_spec(package) is None:
            pytest.skip(f"{package} is not installed: {getattr(module, 'INSTALL', 'make setup')}")
    return module

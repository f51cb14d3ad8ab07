"""What all tests with servers share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def _mlflow_shows_no_bar() -> Iterator[None]:
    """Its progress bar of a download starts a thread of tqdm's that stays."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
        yield

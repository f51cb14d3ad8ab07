"""What importing LightGBM does once in a process is done before the tests, which would seem to leave it behind."""

from __future__ import annotations

import lightgbm  # noqa: F401 - with scikit-learn, which sets environment variables

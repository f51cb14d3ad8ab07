"""`HorovodRunner`: a function that uses Horovod, on the cluster or on the driver (driver)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tritium.errors import BadSetting
from tritium_compat import jobs

_VERBOSITY = {"all": "all", "log_callback_only": "none"}


class HorovodRunner:
    """Runs a function in the ranks of a gang, connected for Horovod."""

    def __init__(self, *, np: int, driver_log_verbosity: str = "log_callback_only") -> None:
        """Set how many ranks there are.

        np : that many Spark tasks; below 0 that many processes on the driver; 0: as many as Spark has slots.
        driver_log_verbosity : "all" shows what every rank prints, "log_callback_only" what is sent by `log_to_driver`.
        """
        if isinstance(np, bool) or not isinstance(np, int):
            raise BadSetting(f"HorovodRunner(np={np!r}): it must be a whole number.", setting="np")
        if driver_log_verbosity not in _VERBOSITY:
            raise BadSetting(
                f'HorovodRunner(driver_log_verbosity={driver_log_verbosity!r}): choose "all" or "log_callback_only".',
                setting="driver_log_verbosity",
            )
        self._np, self._verbosity = np, driver_log_verbosity

    @property
    def num_processor(self) -> int:
        """The `np` that was given."""
        return self._np

    def run(self, main: Callable[..., Any], **kwargs: Any) -> Any:
        """Call `main(**kwargs)` in every rank, and return the result of rank 0."""
        results = jobs.run(
            main,
            abs(self._np) or jobs.slots(),
            local=self._np < 0,
            kwargs=kwargs,
            framework="horovod",
            output=_VERBOSITY[self._verbosity],
        )
        return results[0]

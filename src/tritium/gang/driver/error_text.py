"""Complete the message of an error before `launch` raises it (driver)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tritium.errors import BadRow, DataChanged, IncompleteShard, JobFailed, RankFailed, SetupError, TritiumError, masked

if TYPE_CHECKING:
    from tritium.gang.driver.recorder import Recorder


def finish(error: TritiumError, recorder: Recorder, tried: Sequence[str] = ()) -> None:
    """Append to the message the attempts in `tried`, the places of logs and checkpoints, and how to continue.

    A SetupError is left as it is where nothing has started.
    """
    if isinstance(error, SetupError) and not tried and recorder.newest is None:
        return
    places = []
    if tried or isinstance(error, (RankFailed, JobFailed, IncompleteShard)):
        places += [f"Logs and events of the whole run: {recorder.run_dir}"]
    if recorder.newest is not None:
        step, path = recorder.newest
        places += [f"Newest checkpoint: step {step}, in {path}"]
        if not isinstance(error, (BadRow, DataChanged)):  # The same call would raise these again.
            places += [f'Next: the same call with run_dir="{recorder.run_dir}" continues from there.']
    paragraphs = [str(error).rstrip(), "\n".join(filter(None, tried)), "\n".join(places)]
    error.args = (masked("\n\n".join(filter(None, paragraphs))),)

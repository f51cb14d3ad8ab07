"""Which tests pytest-xdist gives to which process (the process that starts the others)."""

from __future__ import annotations

from xdist.scheduler import LoadScopeScheduling

from clusters import EXTRA, KINDS


class ByCluster(LoadScopeScheduling):  # type: ignore[misc]
    """Keeps the tests of one kind of cluster, or of one file, in one process.

    Two `local-cluster`s that start in the same second have the same id, and then each other's work directory.
    """

    def _split_scope(self, nodeid: str) -> str:
        file, _, test = nodeid.partition("::")
        words = f"-{test.partition('[')[2].removesuffix(']')}-"
        kinds = [kind for kind in (*KINDS[1:], *EXTRA) if f"-{kind}-" in words]
        return max(kinds, key=len) if kinds else file

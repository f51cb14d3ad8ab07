"""Which tests pytest-xdist gives to which process."""

from __future__ import annotations

from typing import Any

from xdist.scheduler import LoadScopeScheduling

from clusters import EXTRA, KINDS
from no_jvm import NO_JVM, starts_no_jvm

PLACES = tuple(f"tests/{place}" for place in NO_JVM)


class ByCluster(LoadScopeScheduling):  # type: ignore[misc]
    """Keeps the tests of one kind of cluster, or of one file, in one process.

    Two `local-cluster`s that start in the same second have the same id, and then each other's work directory. Processes
    beyond the second take tests of NO_JVM alone: they use the cores while the others wait. These take such tests last,
    so that all have work until the end.
    """

    def _split_scope(self, nodeid: str) -> str:
        file, _, test = nodeid.partition("::")
        words = f"-{test.partition('[')[2].removesuffix(']')}-"
        kinds = [kind for kind in (*KINDS[1:], *EXTRA) if f"-{kind}-" in words]
        return max(kinds, key=len) if kinds else file

    def _assign_work_unit(self, node: Any) -> None:
        no_jvm = starts_no_jvm(node.gateway.id)
        scope = next((scope for scope in self.workqueue if scope.startswith(PLACES) == no_jvm), None)
        if scope is not None:
            self.workqueue.move_to_end(scope, last=False)
        elif no_jvm:
            node.shutdown()
            return
        super()._assign_work_unit(node)

"""The memory that a process may use."""

from __future__ import annotations

from pathlib import Path

from tritium.data.shard import memory_limit


def test_the_machine_or_its_container_limits_it(tmp_path: Path) -> None:
    whole = memory_limit(tmp_path, tmp_path / "none")
    assert whole > 1 << 28
    assert memory_limit() <= whole

    def limited(lines: str, files: dict[str, str]) -> int:
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
        (tmp_path / "cgroup").write_text(lines)
        return memory_limit(tmp_path, tmp_path / "cgroup")

    assert limited("0::/", {"memory.max": "max\n"}) == whole
    assert limited("0::/a/b\n", {"a/memory.max": "7000\n", "a/b/memory.max": "max\n"}) == 7000
    assert limited("0::/a/b\n", {"a/b/memory.max": "6000\n"}) == 6000
    old = {"memory/job/memory.limit_in_bytes": "5000\n", "memory/memory.limit_in_bytes": "9223372036854771712\n"}
    assert limited("4:cpu,memory:/job\n1:name=systemd:/x\n", old) == 5000
    assert limited("4:memory:/gone\n", {}) == whole

"""Every benchmark, one after another, each in a process of its own: `make bench`, or `python benchmarks [name …]`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def main(names: list[str]) -> int:
    """Run the benchmarks of these names, or all; returns how many failed."""
    scripts = sorted(p for p in HERE.glob("*.py") if not p.name.startswith("_"))
    unknown = set(names) - {p.stem for p in scripts}
    if unknown:
        print(f"There is no benchmark {', '.join(sorted(unknown))}. There are: {', '.join(p.stem for p in scripts)}.")
        return 1
    failed = []
    for script in scripts:
        if not names or script.stem in names:
            print(f"\n=== {script.stem}", flush=True)
            if subprocess.run([sys.executable, str(script)], check=False).returncode:
                failed.append(script.stem)
    if failed:
        print(f"\nFailed: {', '.join(failed)}")
    return len(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

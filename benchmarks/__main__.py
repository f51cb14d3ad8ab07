"""Every benchmark, one after another, each in a process of its own: `make bench`, or `python benchmarks [name …]`.

Those with results in docs/benchmarks.md save them, and the page is made again at the end. The peers' environments are
made first (.bench/, some 30 GB on a disk that can't share files, and twenty minutes, most of it horovod, twice).
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import _page
import _suite

HERE = Path(__file__).parent
SAVED = {  # what docs/benchmarks.md shows, and with which settings
    "train": ["--memory"],
    "loop": [],
    "first_step": [],
    "launch": [],
    "inference": [],
    "exchange": [],
    "as_bytes": [],
    "memory": [],
    "scale": [],
    "stream": [],
    "images": [],
    "batch": [],
    "keras_estimator": [],
    "rossmann": [],
    "trees": [],
    "train_jax": [],
    "mpi": [],
    "horovod_optimizer": [],
    "real_tables": [],
}


def main(names: list[str]) -> int:
    """Run the benchmarks of these names, or all; returns how many failed."""
    scripts = sorted(p for p in HERE.glob("*.py") if not p.name.startswith("_"))
    unknown = set(names) - {p.stem for p in scripts}
    if unknown:
        print(f"There is no benchmark {', '.join(sorted(unknown))}. There are: {', '.join(p.stem for p in scripts)}.")
        return 1
    chosen = [script for script in scripts if not names or script.stem in names]
    if any(script.stem in SAVED for script in chosen):
        for environment in sorted(path.stem for path in HERE.glob("environments/*.txt") if "." not in path.stem):
            print(f"environment {environment}: {_suite.python_of(environment)}", flush=True)
    failed = []
    for script in chosen:
        print(f"\n=== {script.stem}", flush=True)
        options = ["--save", *SAVED[script.stem]] if script.stem in SAVED else []
        if subprocess.run([sys.executable, str(script), *options], check=False).returncode:
            failed.append(script.stem)
    if _page.results():
        _page.main()
    if failed:
        print(f"\nFailed: {', '.join(failed)}")
    return len(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

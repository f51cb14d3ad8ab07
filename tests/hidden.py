"""Packages that ranks don't find: what a framework imports only because it is installed takes up to half of its import.

Seconds of processor time in each rank: `import tensorflow` 4.9, of which Keras 1.9; `import keras` on JAX 4.5, of which
TensorFlow 2.5; scikit-learn, for Keras's wrappers, 0.8.
"""

from __future__ import annotations

from pathlib import Path


def environment(folder: Path, *packages: str) -> dict[str, str]:
    """Return the variable with which a Python does not find these packages. `folder` is filled, and must stay."""
    for name in packages:
        place = folder / name
        place.mkdir(exist_ok=True)
        place.joinpath("__init__.py").write_text(
            f'raise ModuleNotFoundError("No module named {name!r}", name={name!r})'
        )
    return {"PYTHONPATH": str(folder)} if packages else {}

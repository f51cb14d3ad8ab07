"""Generated data in the formats, and under the names, that public examples download: MNIST thrice, and pictures."""

from __future__ import annotations

import bz2
from pathlib import Path
from typing import Any

import numpy as np

TRAIN, TEST = 2000, 400


def digits(rows: int, seed: int) -> tuple[Any, Any]:
    """Return images (rows, 28, 28) of uint8 and labels (rows,): a noisy pattern for each of ten labels."""
    patterns = np.random.default_rng(0).random((10, 7, 7)) < 0.4
    draw = np.random.default_rng(seed)
    labels = draw.integers(0, 10, rows).astype(np.uint8)
    images = np.kron(patterns[labels], np.ones((1, 4, 4))) * 200 + draw.normal(0, 40, (rows, 28, 28))
    return images.clip(0, 255).astype(np.uint8), labels


def write_idx(folder: Path) -> None:
    """Write what torchvision's `MNIST(folder, download=True)` finds to be there already."""
    raw = folder / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for name, rows, seed in (("train", TRAIN, 1), ("t10k", TEST, 2)):
        for kind, values in zip(("images-idx3", "labels-idx1"), digits(rows, seed), strict=True):
            head = bytes([0, 0, 8, values.ndim]) + np.array(values.shape, ">i4").tobytes()
            (raw / f"{name}-{kind}-ubyte").write_bytes(head + values.tobytes())


def write_npz(path: Path) -> None:
    """Write what Keras's `mnist.load_data` reads once it has been downloaded."""
    (x_train, y_train), (x_test, y_test) = digits(TRAIN // 4, 1), digits(TEST // 4, 2)
    np.savez(path, x_train=x_train, y_train=y_train, x_test=x_test, y_test=y_test)


def write_libsvm(path: Path) -> None:
    """Write MNIST as libsvm's page has it: a label and the pixels that are not 0, scaled, in lines."""
    images, labels = digits(TRAIN, 1)
    lines = []
    for image, label in zip(images.reshape(TRAIN, -1), labels, strict=True):
        pixels = " ".join(f"{i + 1}:{image[i] / 255:.3f}" for i in np.flatnonzero(image))
        lines.append(f"{label} {pixels}\n")
    path.write_bytes(bz2.compress("".join(lines).encode()))


def write_pictures(folder: Path) -> None:
    """Write a folder of pictures for each of two classes, for training and for validation, as ImageNet comes."""
    from PIL import Image

    draw = np.random.default_rng(3)
    for part, count in (("train", 4), ("validation", 2)):
        for name in ("n01", "n02"):
            (folder / part / name).mkdir(parents=True)
            for i in range(count):
                pixels = draw.integers(0, 256, (256, 256, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / part / name / f"{i}.jpeg")


def write_all(folder: Path) -> None:
    """Write all, below one folder."""
    write_idx(folder / "torchvision")
    write_idx(folder / "petastorm" / "data")
    write_npz(folder / "mnist.npz")
    write_libsvm(folder / "mnist.bz2")
    write_pictures(folder / "pictures")

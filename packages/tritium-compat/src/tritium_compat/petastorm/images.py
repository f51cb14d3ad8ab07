"""Images as files of an image format, by OpenCV or Pillow, whichever is installed (any process)."""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from io import BytesIO
from typing import Any

import numpy as np

_PNG = b"\x89PNG\r\n\x1a\n"
_MISSING = (
    "Images are stored compressed in this data set, and neither OpenCV nor Pillow is installed here. Install one: pip "
    "install opencv-python-headless, or pip install pillow."
)


def encode(image: Any, image_format: str, quality: int) -> bytes:
    """Return an image [height, width] or [height, width, 3] (RGB) as a file."""
    if find_spec("cv2") is not None:
        cv2 = importlib.import_module("cv2")
        written, contents = cv2.imencode(
            f".{image_format}", image[..., ::-1] if image.ndim == 3 else image, [1, quality]
        )
        if not written:
            raise ValueError(f"OpenCV can't write the image as {image_format}.")
        return bytes(contents)
    if image.dtype != np.uint8 and not (image.dtype == np.uint16 and image.ndim == 2):
        raise ValueError(f"Pillow can't write an image of {image.dtype} and {image.ndim} dimensions. Install OpenCV.")
    file = BytesIO()
    _pillow().fromarray(image).save(file, format="jpeg" if image_format == "jpg" else image_format, quality=quality)
    return file.getvalue()


def decode(contents: bytes) -> Any:
    """Return a file as an image [height, width] or [height, width, 3] (RGB)."""
    image = _by_opencv(contents) if find_spec("cv2") is not None else _by_pillow(contents)
    if image.ndim == 2 or (image.ndim == 3 and image.shape[2] == 3):
        return image
    raise ValueError(f"The image has the shape {image.shape}; [height, width] or [height, width, 3] can be read.")


def _by_opencv(contents: bytes) -> Any:
    cv2 = importlib.import_module("cv2")
    image = cv2.imdecode(np.frombuffer(contents, np.uint8), cv2.IMREAD_UNCHANGED)
    if image is None:
        raise ValueError("OpenCV can't read the image.")
    return np.ascontiguousarray(image[:, :, ::-1]) if image.ndim == 3 and image.shape[2] == 3 else image


def _by_pillow(contents: bytes) -> Any:
    # Pillow reads 16 bits a channel as 8 where there are several channels, and says nothing.
    if contents[:8] == _PNG and contents[24] == 16 and contents[25] != 0:
        raise ValueError("Pillow can't read a colour PNG of 16 bits a channel. Install OpenCV.")
    with _pillow().open(BytesIO(contents)) as image:
        if image.mode in ("1", "P"):
            image = image.convert("L" if image.mode == "1" else "RGB")
        array = np.array(image)  # a copy, as the image's own memory can't be written to
    return array.astype(np.uint16) if array.dtype == np.int32 else array


def _pillow() -> Any:
    try:
        return importlib.import_module("PIL.Image")
    except ImportError as error:
        raise ModuleNotFoundError(_MISSING) from error

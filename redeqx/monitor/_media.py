"""Images and texts of a run: plain files in `workdir/media/`, by step and name. Pillow writes the images."""

import importlib.util
import io
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..storage import make_subfolder, write_file

_ROUNDED = 1 / 256  # how far floats may be outside of 0 to 1: the rounding error of bfloat16
_FILE = re.compile(r"step_(\d{8,})_.*\.(png|txt)$")
_MAX_NAME = 200  # bytes; file systems allow 255, with the step and the suffix


@dataclass(frozen=True)
class MediaFile:
    """An image or a text of one step."""

    name: str  # as trackers show it
    step: int  # optimizer updates done
    content: bytes | str  # a PNG file, or a text

    @property
    def filename(self) -> str:
        """The file name, such as `step_00000100_samples.png`."""
        name = re.sub(r"[^\w.-]", "_", self.name)
        return f"step_{self.step:08d}_{name}.{'txt' if self.is_text else 'png'}"

    @property
    def of(self) -> str:
        """What tells the images or texts of a name from other records; the metrics of no trainer have a slash in it."""
        return f"/{self.name}"

    @property
    def is_text(self) -> bool:
        return isinstance(self.content, str)

    @property
    def data(self) -> bytes:
        """The content of the file, as bytes."""
        return self.content.encode() if isinstance(self.content, str) else self.content

    def write(self, folder: Path) -> Path:
        """Writes the file into a folder, which is created; returns the file's path."""
        make_subfolder(folder, folder.parent)
        path = folder / self.filename
        write_file(path, self.data)
        return path


def rewind_media(folder: Path, step: int) -> None:
    """Deletes the files of images and texts after `step`."""
    for path in () if folder.is_symlink() else folder.glob("step_*"):
        if (found := _FILE.match(path.name)) is not None and int(found[1]) > step:
            path.unlink()


def check_name(name: str) -> None:
    """Raises TypeError if the name of an image or a text is not a string, ValueError if no file can have it."""
    if not isinstance(name, str):
        raise TypeError(f"`name`: expected a string, got {type(name).__name__}. Pass the name first.")
    if not re.search(r"\w", name):
        raise ValueError(f"`name`: expected letters or digits, which name a file, got {name!r}. Pass a name.")
    if (n_bytes := len(name.encode(errors="replace"))) > _MAX_NAME:
        raise ValueError(
            f"`name`: expected at most {_MAX_NAME} bytes, which name a file, got {n_bytes}: {name[:40]!r}... Shorten it."
        )


def check_image(image: Any) -> Any:
    """Converts an image for `png`: to a uint8 NumPy array. A matplotlib figure is returned unchanged.

    Raises TypeError for other types, ValueError for arrays that are not images, ImportError without Pillow.
    """
    if importlib.util.find_spec("PIL") is None:
        raise ImportError(
            '`image`: expected pillow, which writes images, got no such package. Run `pip install "redeqx[images]"`.'
        )
    if hasattr(image, "savefig"):
        return image
    if not (getattr(image, "is_fully_addressable", True) or image.is_fully_replicated):
        raise ValueError(
            f"`image`: expected an array that this process holds whole, got parts of {image.shape} on several processes. "
            "Gather it with `jax.experimental.multihost_utils.process_allgather(image, tiled=True)`."
        )
    try:
        pixels = np.asarray(image)
        pixels = pixels if pixels.dtype == np.uint8 else pixels.astype(np.float32)
    except (TypeError, ValueError):
        raise TypeError(
            f"`image`: expected an array or a matplotlib figure, got {type(image).__name__}. Convert it first."
        ) from None
    if pixels.ndim not in (2, 3) or 0 in pixels.shape or (pixels.ndim == 3 and pixels.shape[2] not in (1, 3, 4)):
        raise ValueError(
            f"`image`: expected the shape [height, width], or [height, width, channels] with 1, 3 or 4 channels, got "
            f"{list(pixels.shape)}. Move the channels last, and join several images to one, "
            "as by `np.concatenate(images, axis=1)`."
        )
    if pixels.dtype == np.uint8:
        return pixels
    low, high = float(pixels.min()), float(pixels.max())
    if not (low >= -_ROUNDED and high <= 1 + _ROUNDED):  # also True for NaN
        raise ValueError(
            f"`image`: expected numbers from 0 to 1, or uint8, got {low:.6g} to {high:.6g}. Rescale it, or pass uint8."
        )
    return np.round(pixels.clip(0, 1) * 255).astype(np.uint8)


def png(image: Any) -> bytes:
    """Returns the PNG file of an image that `check_image` returned, as bytes."""
    file = io.BytesIO()
    if hasattr(image, "savefig"):
        image.savefig(file, format="png")
    else:
        from PIL import Image

        Image.fromarray(image[..., 0] if image.shape[2:] == (1,) else image).save(file, format="png")
    return file.getvalue()


def pixels(data: bytes) -> np.ndarray:
    """Returns the pixels of a PNG file, uint8 `[height, width]` or `[height, width, channels]`."""
    from PIL import Image

    return np.asarray(Image.open(io.BytesIO(data)))

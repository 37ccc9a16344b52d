"""Patches of images that are extended to whole squares by pixels of -1, which no colour has (Inkling)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from weft.config.vision import VisionConfig

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from PIL.Image import Image


def padded_patches(
    image: Image, canvas: tuple[int, int], vision: VisionConfig, values: NDArray[Any], padding: NDArray[Any]
) -> NDArray[Any]:
    """Cut an image into patches, square by square from the top left.

    Args:
        image: 8-bit RGB, at the top left of the canvas.
        canvas: height and width in pixels.
        values: ``[3, 256]``, what each number of each channel becomes.
        padding: ``[3]``, what -1 becomes.

    Returns:
        ``[rows, columns, merge, merge, frames, patch, patch, 3]`` in the dtype of ``values``; all frames are equal.
    """
    import numpy as np

    patch, merge, frames = vision.patch_size, vision.spatial_merge_size, vision.temporal_patch_size
    (height, width), side = canvas, patch * merge
    rows, columns, pixels = height // side, width // side, np.asarray(image)
    patches = np.empty((rows, columns, merge, merge, frames, patch, patch, 3), values.dtype)
    for row in range(rows):
        strip, inside = np.empty((side, width, 3), values.dtype), pixels[row * side : (row + 1) * side]
        strip[:] = padding
        for channel in range(3):
            strip[: len(inside), : image.width, channel] = values[channel][inside[:, :, channel]]
        tiles = strip.reshape(merge, patch, columns, merge, patch, 3)
        patches[row] = tiles.transpose(2, 0, 3, 1, 4, 5)[:, :, :, None]
    return patches

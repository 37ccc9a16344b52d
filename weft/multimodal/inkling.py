"""Settings of Inkling's image processors. transformers' own classes need torchvision, and these read settings alone."""

from functools import cache
from typing import Any


@cache
def inkling_processor() -> Any:
    """Return a class with the defaults of transformers' ``InklingImageProcessor``."""
    from transformers.image_processing_backends import PilBackend
    from transformers.processing_utils import ImagesKwargs
    from transformers.utils.constants import OPENAI_CLIP_MEAN, OPENAI_CLIP_STD

    class InklingImageProcessorKwargs(ImagesKwargs, total=False):  # type: ignore[call-arg]
        """Settings that Inkling alone has."""

        rescale_image_frac: float | None
        rescale_image_max_upscaled_long_edge: int | None

    class InklingImageProcessorPil(PilBackend):
        valid_kwargs = InklingImageProcessorKwargs
        image_mean: Any = OPENAI_CLIP_MEAN
        image_std: Any = OPENAI_CLIP_STD
        do_rescale = True
        do_normalize = True
        resample = 1  # Lanczos
        size = {"height": 40, "width": 40}  # noqa: RUF012
        rescale_image_frac = None
        rescale_image_max_upscaled_long_edge = 2048

    return InklingImageProcessorPil


@cache
def inkling2_processor() -> Any:
    """Return a class with the defaults of transformers' ``Inkling2ImageProcessor``."""
    from transformers.image_processing_backends import PilBackend

    class Inkling2ImageProcessorPil(PilBackend):
        image_mean: Any = (0.5, 0.5, 0.5)
        image_std: Any = (0.5, 0.5, 0.5)
        do_rescale = True
        do_normalize = True
        resample = 0
        size = {"height": 40, "width": 40}  # noqa: RUF012

    return Inkling2ImageProcessorPil

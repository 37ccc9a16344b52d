"""Settings of Inkling's image processor. transformers' own class needs torchvision; this one has its settings alone."""

from transformers.image_processing_backends import PilBackend


class Inkling2ImageProcessorPil(PilBackend):
    """Defaults of transformers' ``Inkling2ImageProcessor``."""

    image_mean = (0.5, 0.5, 0.5)
    image_std = (0.5, 0.5, 0.5)
    do_rescale = True
    do_normalize = True
    resample = 0
    size = {"height": 40, "width": 40}  # noqa: RUF012

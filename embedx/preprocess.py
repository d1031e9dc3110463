"""From a picture to what a network takes."""

import dataclasses
from typing import Any, Literal

import torch
from PIL import Image
from torch import Tensor

from embedx.errors import ConfigError, DataError
from embedx.fingerprints import value_sha256

PREPROCESS_REVISION = 5  # raised when pixels change; part of every file's id

Interpolation = Literal["nearest", "bilinear", "bicubic", "lanczos"]
RESIZED_PIXELS_MOST = 64_000_000
IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


@dataclasses.dataclass(frozen=True)
class Preprocess:
    """From an upright RGB picture to what the network takes.

    The shorter side (of ``squash``, each side) is resized to ``resize_px``, the centre ``crop_px``
    square is cut out, and the pixels are scaled to [0, 1], less ``mean``, over ``std``. A subclass
    may draw random numbers in :meth:`pixels`: row i draws from seed i.

    Attributes:
        resize_px: Length of the shorter side after resizing.
        crop_px: Side of the square that enters the network.
        interpolation: Filter of the resizing, antialiased.
        mean: Per channel, of pixels in [0, 1].
        std: Per channel, of pixels in [0, 1].
        squash: Both sides become ``resize_px``, whatever the picture's shape; else it keeps it.
    """

    resize_px: int
    crop_px: int
    interpolation: Interpolation = "bilinear"
    mean: tuple[float, float, float] = IMAGENET_MEAN
    std: tuple[float, float, float] = IMAGENET_STD
    squash: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.crop_px <= self.resize_px:
            raise ConfigError(
                f"pictures are resized to {self.resize_px} px and cut to {self.crop_px}: make both "
                "at least 1 px, and model.resize no less than model.input_size"
            )

    def pixels(self, image: Image.Image) -> Tensor:
        """Resize and crop, on the CPU: uint8, shape ``(3, crop_px, crop_px)``.

        Raises:
            DataError: The picture is so thin that it would become huge.
        """
        from torchvision.transforms import functional

        short, long = sorted(image.size)
        if not self.squash and self.resize_px**2 * long > short * RESIZED_PIXELS_MOST:
            raise DataError(
                f"{image.width}x{image.height} px is too thin: with {self.resize_px} px on the "
                f"shorter side it has more than {RESIZED_PIXELS_MOST / 1e6:.0f} megapixels"
            )
        mode = functional.InterpolationMode(self.interpolation)
        resized = functional.resize(image, [self.resize_px] * (2 if self.squash else 1), mode)
        cut = functional.center_crop(resized, [self.crop_px])
        pixels: Tensor = functional.pil_to_tensor(cut)
        return pixels

    def normalize(self, pixels: Tensor) -> Tensor:
        """Scale a batch of pixels ``(n, 3, h, w)`` uint8 to float32, on its device."""
        form: dict[str, Any] = {"dtype": torch.float32, "device": pixels.device}
        mean = torch.tensor(self.mean, **form).view(1, 3, 1, 1)
        std = torch.tensor(self.std, **form).view(1, 3, 1, 1)
        return pixels.float().div_(255).sub_(mean).div_(std)

    @property
    def is_own(self) -> bool:
        """Whether it is a class of the user's own, which may draw random numbers."""
        return type(self) is not Preprocess

    def config(self) -> dict[str, Any]:
        """Every setting, as it is stored in the file; of a subclass also a hash of its code."""
        settings: dict[str, Any] = {
            key: list(value) if isinstance(value, tuple) else value
            for key, value in dataclasses.asdict(self).items()
        }
        if self.is_own:
            settings |= {"class": type(self).__qualname__, "code": value_sha256(self)}
        return settings

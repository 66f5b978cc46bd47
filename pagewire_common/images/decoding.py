"""Decodes image files with Pillow. Front ends check with the same function that workers use later, so that a worker
can decode what a front end has admitted."""

from io import BytesIO

from PIL import GifImagePlugin, Image, ImageOps, JpegImagePlugin, PngImagePlugin, WebPImagePlugin

from pagewire_common.images.head import read_head

_PLUGINS = (GifImagePlugin, JpegImagePlugin, PngImagePlugin, WebPImagePlugin)
"""Imported, so that Pillow need not import its other fifty to find these."""


def decode_image(data: bytes) -> Image.Image:
    """The first frame in RGB, rotated as its EXIF data state, with the conversions of transformers' `load_image`.

    Raises ValueError with the rest of a sentence that begins with the image's name.
    """
    head = read_head(data)
    try:
        image = Image.open(BytesIO(data), formats=[head.format.upper()])
        if image.size == (head.width, head.height):  # otherwise no memory is taken for the pixels
            ImageOps.exif_transpose(image, in_place=True)
            return image.convert("RGB")
    except MemoryError:
        raise
    except Exception:  # Pillow's decoders raise many types of errors for damaged files
        raise ValueError(f"is damaged or cut off: it begins as {head.format}, and cannot be decoded") from None
    raise ValueError(f"has {image.width} x {image.height} pixels, and its first bytes say {head.width} x {head.height}")

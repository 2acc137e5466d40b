"""Operations on decoded pixels, uint8 of shape (height, width, channels), channels 1 or 3.

Resizing is torch's antialiased bilinear kernel on bytes: Pillow's BILINEAR filter, equal but for a
rare difference of one level, vectorised and six times as fast. It runs in the calling thread alone;
other torch operations would start threads of their own in each decode thread, so none is used.
"""

from __future__ import annotations

import numpy as np
import torch
from PIL import Image
from torch.nn.functional import interpolate

from paceline.data.source import Pixels


def recolored(pixels: Pixels, channels: int) -> Pixels:
    """Turn grey into RGB or RGB into grey (ITU-R BT.601), where it isn't yet as wanted."""
    if pixels.shape[2] == channels:
        return pixels
    if channels == 3:
        return np.repeat(pixels, 3, axis=2)
    return np.asarray(Image.fromarray(pixels).convert("L"))[:, :, None]


# By EXIF orientation: steps of rows and columns, which from 5 on are swapped first.
ORIENTATION_STEPS = {
    **{2: (1, -1), 3: (-1, -1), 4: (-1, 1)},
    **{5: (1, 1), 6: (1, -1), 7: (-1, -1), 8: (-1, 1)},
}


def upright(pixels: Pixels, orientation: int) -> Pixels:
    """Turn and mirror pixels as an EXIF orientation says, 1 to 8; another one changes nothing."""
    if orientation not in ORIENTATION_STEPS:
        return pixels
    rows, columns = ORIENTATION_STEPS[orientation]
    turned = pixels if orientation < 5 else pixels.transpose(1, 0, 2)
    return turned[::rows, ::columns]


def resized(pixels: Pixels, size: int) -> Pixels:
    """Resize to (size, size, channels), bilinear, antialiased where it shrinks."""
    height, width, channels = pixels.shape
    if (height, width) == (size, size):
        return pixels
    # The kernel wants writable rows without gaps: NCHW in shape, NHWC in memory.
    rows = np.array(pixels, order="C").reshape(1, height, width, channels)
    images = torch.from_numpy(rows).permute(0, 3, 1, 2)
    images = interpolate(images, size=(size, size), mode="bilinear", antialias=True)
    return images[0].permute(1, 2, 0).numpy()


def place(pixels: Pixels, out: Pixels, *, shift: tuple[int, int], flip: bool, fill: Pixels) -> None:
    """Copy pixels into a slot, mirrored and then moved.

    Args:
        pixels: shape (size, size, channels).
        out: the slot, of the same shape.
        shift: pixels to move (down, right).
        flip: mirror left and right.
        fill: the colour of what the move leaves empty, shape (channels,).
    """
    if flip:
        pixels = pixels[:, ::-1]
    if shift != (0, 0):
        down, right = shift
        height, width, _ = out.shape
        out[:] = fill
        out = out[max(0, down) : height + down, max(0, right) : width + right]
        pixels = pixels[max(0, -down) : height - down, max(0, -right) : width - right]
    if not flip:
        out[:] = pixels
        return
    for channel in range(out.shape[2]):  # numpy mirrors planes three times as fast as pixels
        out[:, :, channel] = pixels[:, :, channel]

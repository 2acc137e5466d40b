"""What the records of a new database leave out of its images: transparency, frames, and bits.

Images whose values fill little of what their format has room for, as 12 bits in a file of 16, would
become almost black: they are refused, unless the caller says which values are black and white. Of
images of 8 bits, such as masks whose values are the numbers of classes, a sentence says so.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from paceline.data.image.deep_pixels import DeepFormat, ValueRange
from paceline.data.image.image_file import StoredForm
from paceline.errors import DataError, many

_LEAST_SHARE = 0.07  # of the format's range, in all images together; 12 bits of 16 have 1/16


@dataclass(kw_only=True)
class _Values:
    """Number of images of a depth, or of 8 bits, and their least and greatest value."""

    images: int
    least: float
    greatest: float


@dataclass(kw_only=True)
class ReducedImages:
    """Counter of the images that lose transparency, frames or bits.

    Attributes:
        value_range: the values of black and white that the caller gave, for grey images; or None.
        transparent: the number of images whose transparency was dropped.
        many_frames: the number of images of whose frames or pages only the first was read.
    """

    value_range: ValueRange | None = None
    transparent: int = 0
    many_frames: int = 0
    _values: dict[DeepFormat | None, _Values] = field(default_factory=dict)

    def add(self, stored: StoredForm) -> None:
        """Count an image."""
        self.transparent += stored.transparent
        self.many_frames += stored.frames > 1
        if stored.values is None:
            return
        least, greatest = stored.values
        seen = self._values.setdefault(
            stored.depth, _Values(images=0, least=least, greatest=greatest)
        )
        seen.images += 1
        seen.least = min(seen.least, least)
        seen.greatest = max(seen.greatest, greatest)

    def require_contrast(self, name: object) -> None:
        """Refuse images that would be almost of one shade.

        Args:
            name: what holds them, for the message.

        Raises:
            DataError: they would be.
        """
        for depth, seen in self._values.items():
            if depth is None:
                continue
            span = seen.greatest - seen.least
            given = depth.grey and self.value_range is not None
            if given or depth.white is None or not 0 < span < depth.white * _LEAST_SHARE:
                continue
            remedy = (
                f"Give --value_range {seen.least:g} {seen.greatest:g}, the values that become "
                f"black and white, or --value_range 0 {depth.white} to leave them so"
                if depth.grey
                else "Convert them to 8 bits a colour with a tool that scales by these values"
            )
            raise DataError(
                f"{name}: all values of its {many(seen.images, 'image')} of {depth.kind} are "
                f"within {_number(seen.least)} to {_number(seen.greatest)}, where white is "
                f"{depth.white:,}: they would be almost of one shade. {remedy}."
            )

    def notes(self) -> Iterator[str]:
        """Yield sentences about what was left out."""
        if self.transparent:
            have = "has" if self.transparent == 1 else "have"
            yield (
                f"{many(self.transparent, 'image')} {have} transparent pixels: transparency was "
                "dropped, colours are as stored."
            )
        if self.many_frames:
            have = "has" if self.many_frames == 1 else "have"
            yield (
                f"{many(self.many_frames, 'image')} {have} several frames or pages: the first is "
                "used, and the others were left out."
            )
        for depth, seen in self._values.items():
            if depth is None:
                yield from _note_of_dark(seen)
                continue
            given = self.value_range if depth.grey else None
            black, white = given or (0, depth.white or 0)
            yield (
                f"{many(seen.images, 'image')} of {depth.kind}: scaled to 8 bits, from "
                f"{_number(black)} (black) to {_number(white)} (white); the values are "
                f"{_number(seen.least)} to {_number(seen.greatest)}."
            )


def _note_of_dark(seen: _Values) -> Iterator[str]:
    if 0 < seen.greatest - seen.least < 255 * _LEAST_SHARE:
        yield (
            f"All values of {many(seen.images, 'image')} of 8 bits are within "
            f"{_number(seen.least)} to {_number(seen.greatest)}, where white is 255: they are "
            "almost of one shade. If that isn't meant, scale them with another tool first."
        )


def _number(value: float) -> str:
    return f"{value:,.6g}" if value % 1 else f"{int(value):,}"

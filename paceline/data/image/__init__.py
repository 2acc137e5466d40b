"""From an encoded image to the pixels of a sample: decode, crop, resize, mirror, colour."""

"""The image formats that aren't decoded, by name: such a file is an image that can't be read.

A file is what its first bytes show. Its suffix decides where they show nothing, and where they are
TIFF's, as those of most camera raw files are: what a TIFF decoder finds there is a thumbnail.
"""

from __future__ import annotations

# With the kind's name in a message: "an image of the kind HEIC".
_MAGIC = {
    "JPEG XL": (b"\xff\x0a", b"\0\0\0\x0cJXL \r\n\x87\n"),
    "JPEG 2000": (b"\0\0\0\x0cjP  \r\n\x87\n", b"\xff\x4f\xff\x51"),
    "JPEG XR": (b"II\xbc\x01",),
    "camera raw": (
        *(b"FUJIFILMCCD-RAW", b"IIRO", b"IIRS", b"MMOR", b"IIU\0", b"FOVb", b"\0MRM"),
        b"II\x1a\0\0\0HEAPCCDR",
    ),
    "Photoshop": (b"8BPS",),
    "OpenEXR": (b"\x76\x2f\x31\x01",),
    "Radiance HDR": (b"#?RADIANCE", b"#?RGBE"),
    "FITS": (b"SIMPLE  =",),
    "QOI": (b"qoif",),
}
_BRANDS = {  # of ISO's base media format, major or compatible; AVIF's files name HEIC's as well
    "AVIF": (b"avif", b"avis"),
    "camera raw": (b"crx ",),
    "HEIC": (*(b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx"), b"mif1", b"msf1"),
}
_SUFFIXES = {
    "HEIC": ".heic .heif .hif",
    "AVIF": ".avif .avifs",
    "JPEG XL": ".jxl",
    "JPEG 2000": ".jp2 .j2k .jpx .jpf",
    "JPEG XR": ".jxr .wdp",
    "camera raw": (
        ".3fr .arw .cr2 .cr3 .crw .dcr .dng .erf .fff .gpr .iiq .kdc .mef .mos .mrw .nef .nrw .orf "
        ".pef .raf .rw2 .rwl .sr2 .srf .srw .x3f"
    ),
    "Photoshop": ".psd .psb",
    "OpenEXR": ".exr",
    "DICOM": ".dcm",
    "FITS": ".fits",
    "QOI": ".qoi",
    "Targa": ".tga",
    "SVG": ".svg",
    "icon": ".ico",
}
_KIND_OF_SUFFIX = {
    suffix: kind for kind, suffixes in _SUFFIXES.items() for suffix in suffixes.split()
}
_DICOM = 128  # bytes before its magic
_CR2 = 8  # likewise, in a TIFF


def unread_by_content(data: bytes) -> str | None:
    """Name the kind of an image that isn't decoded, by its first bytes; None for anything else."""
    for kind, magic in _MAGIC.items():
        if data.startswith(magic):
            return kind
    if data[4:8] == b"ftyp":
        size = min(int.from_bytes(data[:4], "big"), 256)
        brands = {data[at : at + 4] for at in range(8, size, 4)}
        return next((kind for kind, known in _BRANDS.items() if brands.intersection(known)), None)
    if data[_DICOM:].startswith(b"DICM"):
        return "DICOM"
    return "camera raw" if data[_CR2:].startswith(b"CR\x02\0") else None


def unread_by_name(name: str) -> str | None:
    """Name the kind of image that a file's suffix promises, if it isn't decoded."""
    _, dot, suffix = name.rpartition(".")
    return _KIND_OF_SUFFIX.get(f"{dot}{suffix}".lower())

"""Extract the uncompressed kernel from a bzImage.

QEMU starts an uncompressed kernel at its PVH entry point. Decompressing it on the host takes less
than one second, once. An emulated processor would need four seconds at every boot.
"""

import gzip
import lzma
import shutil
import struct
import subprocess
from collections.abc import Callable

__all__ = ["extract"]

_ELF = b"\x7fELF"


def extract(image: bytes) -> bytes | None:
    """Return the ELF kernel in a bzImage.

    None: the image is not a bzImage, or its compression is not supported.
    """
    payload = _payload(image)
    for magic, decompress in _DECOMPRESS.items():
        if payload.startswith(magic):
            kernel = decompress(payload)
            return kernel if kernel is not None and kernel.startswith(_ELF) else None
    return None


def _payload(image: bytes) -> bytes:
    """Return the compressed kernel; b"" if the image is not a bzImage.

    See "The Linux/x86 Boot Protocol", fields setup_sects and payload_*.
    """
    if len(image) < 0x250 or image[0x202:0x206] != b"HdrS":
        return b""
    sectors = image[0x1F1] or 4
    offset, length = struct.unpack_from("<II", image, 0x248)
    start = (sectors + 1) * 512 + offset
    return image[start : start + length]


def _xz(payload: bytes) -> bytes:
    # The payload ends with the kernel's size, which is not part of the compressed stream.
    return lzma.LZMADecompressor().decompress(payload)


def _gzip(payload: bytes) -> bytes:
    return gzip.decompress(payload[:-4])


def _zstd(payload: bytes) -> bytes | None:
    if shutil.which("zstd") is None:
        return None
    argv = ["zstd", "-dcq"]
    return subprocess.run(argv, input=payload[:-4], stdout=subprocess.PIPE, check=True).stdout


_DECOMPRESS: dict[bytes, Callable[[bytes], bytes | None]] = {
    b"\xfd7zXZ\0": _xz,
    b"\x1f\x8b": _gzip,
    b"\x28\xb5\x2f\xfd": _zstd,
}

"""What decoding on the GPU needs, and the sentence where it is missing."""

from __future__ import annotations

from importlib import import_module

import numpy as np
import simplejpeg
import torch

from paceline.data.gpu_decode.jpeg_decoder import TorchvisionDecoder
from paceline.data.image.formats import reason_of
from paceline.errors import ConfigError, Message

_PACKAGES = {
    "torchvision": "run pip install 'paceline[gpu]' beside a CUDA build of torch",
    "triton": "install a CUDA build of torch, which brings it",
}


def require_gpu_decoding(given: str) -> None:
    """Check that this process can decode on its current CUDA device, by a file of one colour.

    Args:
        given: the `--decode_device` that asks for it.

    Raises:
        ConfigError: it has no such device, torchvision or Triton is missing or doesn't import, or
            nvJPEG refuses the file.
    """
    if not torch.cuda.is_available():
        raise _refusal(
            given, "it needs a CUDA device, and torch finds none here", "start it where one is"
        )
    for package, remedy in _PACKAGES.items():
        try:
            import_module(package)
        except ModuleNotFoundError:
            raise _refusal(given, f"it needs {package}, which isn't installed", remedy) from None
        except Exception as error:  # torchvision beside torch's CPU wheel: a RuntimeError
            rule = f"it needs {package}, which doesn't import: {reason_of(error)}"
            raise _refusal(given, rule, remedy) from error
    encoded: bytes = simplejpeg.encode_jpeg(np.zeros((16, 16, 3), np.uint8))
    file = torch.frombuffer(bytearray(encoded), dtype=torch.uint8)
    device = torch.device("cuda", torch.cuda.current_device())  # by number, as the training's
    try:
        TorchvisionDecoder(channels=3, device=device).decode([file])
    except RuntimeError as error:
        rule = f"nvJPEG, through torchvision, can't decode here: {reason_of(error)}"
        raise _refusal(given, rule, _PACKAGES["torchvision"]) from error


def _refusal(given: str, rule: str, remedy: str) -> ConfigError:
    other = Message("{}, or decode by {--decode_device} cpu", remedy)
    return ConfigError(flag="decode_device", value=given, rule=rule, remedy=other)

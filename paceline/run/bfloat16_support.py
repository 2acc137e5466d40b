"""Does a device compute in bfloat16, or only emulate it?

Processors without the instructions convert every value to float32 and back, which is slower than
float32 itself. They have them with AVX512-BF16 or AMX (Intel since 2020 and 2023, AMD since 2022),
or ARM's BF16 extension; NVIDIA's GPUs from compute capability 8.0 (Ampere) on; AMD's all.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

_INSTRUCTIONS = ("avx512_bf16", "amx_bf16", "bf16", "sve_bf16")
_FIRST_GENERATION = 8  # compute capability of the first GPUs of NVIDIA's that have it


def computes_bfloat16(capabilities: Mapping[str, object]) -> bool:
    """Tell whether a device of these capabilities has instructions for bfloat16.

    Args:
        capabilities: of a processor, as `torch.cpu.get_capabilities()` names them; of a GPU, its
            `compute_capability`, an int, or `hip`: it is AMD's.
    """
    if any(capabilities.get(name) for name in (*_INSTRUCTIONS, "hip")):
        return True
    generation = capabilities.get("compute_capability", 0)
    return isinstance(generation, int) and generation >= _FIRST_GENERATION


def capabilities_of(device: torch.device) -> Mapping[str, object]:
    """Ask a device what it can; a GPU is taken hold of by that."""
    if device.type == "cpu":
        if hasattr(torch.cpu, "get_capabilities"):  # in torch's newer versions
            return torch.cpu.get_capabilities()
        return {
            "avx512_bf16": torch.cpu._is_avx512_bf16_supported(),
            "amx_bf16": torch.cpu._is_amx_tile_supported(),
        }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return {"compute_capability": properties.major, "hip": torch.version.hip is not None}
    return {"hip": True}  # other devices: nothing is known against them

"""Which devices compute in bfloat16, and the sentence for those that emulate it."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch

from paceline.run.precision import capabilities_of, computes_bfloat16


@pytest.mark.parametrize(
    "capabilities",
    [
        {"architecture": "x86_64", "avx512_f": True, "avx512_bf16": True, "amx_bf16": False},
        {"architecture": "x86_64", "avx512_bf16": False, "amx_tile": True, "amx_bf16": True},
        {"architecture": "aarch64", "neon": True, "bf16": True},
        {"architecture": "aarch64", "neon": True, "bf16": False, "sve_bf16": True},
        {"compute_capability": 8, "hip": False},
        {"compute_capability": 12, "hip": False},
        {"compute_capability": 9, "hip": True},
    ],
)
def test_a_device_with_instructions_computes_it(capabilities: Mapping[str, object]) -> None:
    assert computes_bfloat16(capabilities)


@pytest.mark.parametrize(
    "capabilities",
    [
        {"architecture": "x86_64", "avx2": True, "f16c": True},
        {"architecture": "x86_64", "avx512_f": True, "avx512_fp16": True, "avx512_bf16": False},
        {"architecture": "x86_64", "amx_tile": True, "amx_int8": True, "amx_bf16": False},
        {"architecture": "aarch64", "neon": True, "fp16_arith": True, "bf16": False},
        {"compute_capability": 7, "hip": False},
        {},
    ],
)
def test_a_device_without_instructions_emulates_it(capabilities: Mapping[str, object]) -> None:
    assert not computes_bfloat16(capabilities)


def test_this_processor_answers_as_torch_does() -> None:
    known = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    if torch.cpu.get_capabilities().get("architecture") == "x86_64":
        assert computes_bfloat16(capabilities_of(torch.device("cpu"))) == known

"""The models of the benchmarks: their sizes, and gradients that no layer lacks."""

from __future__ import annotations

import pytest
import torch

from tests.harness.documents.benchmark_runs import load

MILLIONS = {"resnet50": 25.6, "vgg16": 19.4, "lstm": 12.2, "gpt": 12.3}


@pytest.mark.parametrize("model", MILLIONS)
def test_a_model_has_as_many_parameters_as_its_description_says(model: str) -> None:
    assert load("variants").ring_bytes(model, 2) / 4e6 == pytest.approx(MILLIONS[model], abs=0.05)


@pytest.mark.parametrize("model", ["vgg16", "lstm", "gpt"])
def test_each_parameter_of_a_model_gets_a_gradient(model: str) -> None:
    workloads = load("workloads")
    torch.manual_seed(0)
    work = workloads.workload_of(model)
    network = work.build()
    inputs, targets = work.samples(2, work.image_size)
    workloads.loss_of(network(inputs), targets).backward()
    for name, parameter in network.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().max() > 1e-6, name


@pytest.mark.parametrize("model", ["lstm", "gpt"])
def test_the_targets_of_text_are_the_next_tokens(model: str) -> None:
    work = load("workloads").workload_of(model)
    inputs, targets = work.samples(3, 0)
    assert inputs.shape == targets.shape == (3, work.length)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert int(inputs.max()) < work.classes


def test_a_gpt_s_logits_depend_on_no_later_token() -> None:
    torch.manual_seed(0)
    work = load("workloads").workload_of("gpt")
    network = work.build()
    inputs, _ = work.samples(1, 0)
    changed = inputs.clone()
    changed[0, 40] = (changed[0, 40] + 1) % work.classes
    with torch.inference_mode():
        before, after = network(inputs), network(changed)
    assert torch.equal(before[0, :40], after[0, :40])
    assert not torch.equal(before[0, 40], after[0, 40])

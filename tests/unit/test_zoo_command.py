"""`paceline zoo`, models of packages that aren't installed, and the model that weights are of."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.cli.main import main
from paceline.errors import ConfigError
from paceline.models.zoo import build_model
from paceline.state.weights import load_weights, save_weights
from tests.harness.processes.bad_inputs import NULL, Bad, require_answer


def test_our_models_are_listed_with_sizes_and_published_accuracies(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["zoo", "resnet*", "--json"]) == 0
    found = {one["name"]: one for one in map(json.loads, capsys.readouterr().out.splitlines())}
    assert found["resnet50"]["parameters"] == 25_557_032  # torchvision's number
    assert (found["resnet20"]["data"], found["resnet20"]["accuracy"]) == ("CIFAR-10", 0.9125)
    assert main(["zoo", "resnet2*"]) == 0
    assert "resnet20 │ 0.27 M" in capsys.readouterr().out


def test_a_package_that_isnt_installed_is_named(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("paceline.models.other_zoos.find_spec", lambda name: None)
    said = r"The models of timm: the package timm isn't installed; run pip install 'paceline[timm]'"
    assert main(["zoo"]) == 0
    assert said in capfd.readouterr().out
    assert main(["zoo", "timm:*"]) == 2
    assert f"paceline zoo: no model matches 'timm:*'. {said}" in capfd.readouterr().err
    assert main(["zoo", "resnet*"]) == 0
    assert "installed" not in capfd.readouterr().out


@pytest.mark.parametrize(
    ("name", "package"), [("torchvision", "torchvision"), ("timm", "timm"), ("hf", "transformers")]
)
def test_a_model_of_a_package_that_isnt_installed_is_a_sentence(
    name: str,
    package: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("paceline.models.other_zoos.find_spec", lambda name: None)
    said = rf"Model {name}:net: the package {package} isn't installed; run .*paceline\[{name}\]'\."
    require_answer(Bad(command=f"{NULL} --model {name}:net", message=said), tmp_path, capfd)


def test_a_package_that_cant_be_imported_is_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "torchvision").mkdir()
    (tmp_path / "torchvision" / "__init__.py").write_text("raise RuntimeError('no nms')")
    (tmp_path / "torchvision" / "models.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    said = ".*torchvision can't be imported .RuntimeError: no nms .*: install the release of .*"
    require_answer(
        Bad(command=f"{NULL} --model torchvision:resnet18", message=said), tmp_path, capfd
    )


@pytest.mark.parametrize("about", [{"model": "timm:x"}, None])
def test_weights_of_another_model_say_whose_they_are(
    about: dict[str, str] | None, tmp_path: Path
) -> None:
    save_weights(tmp_path / "w.pt", build_model("resnet20", num_labels=7, num_channels=1), about)
    model = build_model("resnet18", num_labels=3, num_channels=3)
    name = "resnet20" if about is None else "timm:x"
    with pytest.raises(ConfigError, match=rf"to another model: .* Give --model {name}\.$"):
        load_weights(tmp_path / "w.pt", model)

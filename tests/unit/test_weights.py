"""Files of weights are plain PyTorch, and what can't be used is named."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from paceline.errors import CheckpointError, ConfigError
from paceline.state.weights import load_weights, save_weights


def test_torch_alone_loads_what_was_saved(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    save_weights(tmp_path / "w.pt", model)
    state = torch.load(tmp_path / "w.pt", weights_only=True)
    assert torch.equal(state["weight"], model.weight)
    assert [path.name for path in tmp_path.iterdir()] == ["w.pt"]


def test_weights_are_loaded_into_a_model_of_the_same_shapes(tmp_path: Path) -> None:
    model, other = nn.Linear(3, 2), nn.Linear(3, 2)
    save_weights(tmp_path / "w.pt", model)
    load_weights(tmp_path / "w.pt", other)
    assert torch.equal(other.weight, model.weight)


def test_another_models_weights_are_refused_with_the_first_reason(tmp_path: Path) -> None:
    save_weights(tmp_path / "w.pt", nn.Linear(3, 2))
    with pytest.raises(ConfigError, match=r"w\.pt: the weights are another model's: size mismatch"):
        load_weights(tmp_path / "w.pt", nn.Linear(4, 2))


def test_a_reason_that_lists_everything_is_cut(tmp_path: Path) -> None:
    save_weights(tmp_path / "w.pt", nn.Sequential(*[nn.Linear(1, 1) for _ in range(300)]))
    with pytest.raises(ConfigError) as raised:
        load_weights(tmp_path / "w.pt", nn.Linear(1, 1))
    assert len(str(raised.value)) < 400


def test_a_missing_file_is_the_callers_mistake(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no such file"):
        load_weights(tmp_path / "none.pt", nn.Linear(1, 1))


@pytest.mark.parametrize("content", [b"", b"abc", b"not weights", b"PK\x03\x04 torn"])
def test_a_damaged_file_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "w.pt").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"w\.pt: not a file of weights, or damaged"):
        load_weights(tmp_path / "w.pt", nn.Linear(1, 1))


class FailsToPickle(nn.Linear):
    """Breaks while its state is written."""

    def state_dict(self, *args: object, **kwargs: object) -> dict[str, object]:  # type: ignore[override]
        return {"fine": torch.ones(1000), "breaks": FullDisk()}


class FullDisk:
    def __reduce__(self) -> str:
        raise OSError(28, "No space left on device")


def test_a_failed_save_leaves_the_old_file_and_no_part(tmp_path: Path) -> None:
    save_weights(tmp_path / "w.pt", nn.Linear(3, 2))
    before = (tmp_path / "w.pt").read_bytes()
    with pytest.raises(CheckpointError, match=r"w\.pt: the weights can't be written: .*No space"):
        save_weights(tmp_path / "w.pt", FailsToPickle(3, 2))
    assert (tmp_path / "w.pt").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["w.pt"]

"""Models and weights that don't fit: of the zoo, of somebody's own, of a file."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.harness.processes.bad_inputs import (
    NET,
    NULL,
    RANK_PREFIX,
    Bad,
    require_answer,
    require_run_answer,
    write_model,
)

OWN = (
    NET
    + '''

class Model(nn.Module):
    """A net that does with its outputs what the test says."""

    def __init__(self, num_labels, then):
        super().__init__()
        self.net, self.then = net(num_labels), then

    def forward(self, images):
        return self.then(self.net(images))


def fails(logits):
    return logits.reshape(7, 7)


def returns_dict(num_labels):
    return Model(num_labels, lambda logits: {"logits": logits, "aux": None})


def too_few(num_labels):
    return net(num_labels - 1)


def fails_in_forward(num_labels):
    return Model(num_labels, fails)


def fails_itself(num_labels):
    return net(num_labels["train"])


def needs_more(num_labels, width):
    return net(num_labels)


def frozen(num_labels):
    return net(num_labels).requires_grad_(False)


def no_module(num_labels):
    return num_labels


def too_large(num_labels):
    return Model(num_labels, lambda logits: logits.expand(1 << 48, -1, -1).clone())


number = 3
'''
)
ZOO = "The zoo has resnet18, .*, resnet56; give your own as package.module:function, or one .*"
AT_ONCE = {
    "resnet21": rf"There is no model resnet21: did you mean resnet20 or resnet18\? {ZOO}",
    "own.net": f"There is no model own.net: {ZOO}",
    "own:": "Model own:: give your own model as package.module:function.",
    "nowhere:net": "Model nowhere:net: module nowhere can't be imported, ModuleNotFoundError: No "
    "module named 'nowhere'; it must be installed, or in a folder of PYTHONPATH, and have no "
    "errors.",
    "broken:net": r"Model broken:net: module broken can't be imported, NameError: name 'oops' is "
    r"not defined \(broken.py, line 3\); it must be installed, or in a folder of PYTHONPATH, and "
    "have no errors.",
    "own:number": "Model own:number: module own has no function number; it has net, Model, fails, "
    "returns_dict, too_few.",
    "own:needs_more": "Model own:needs_more: missing a required argument: 'width'; give the "
    "function's other arguments default values, because it is called with num_labels and "
    "num_channels only.",
}
LATER = {
    "own:no_module": "Model own:no_module returned int: the function must return a "
    "torch.nn.Module.",
    "own:fails_itself": "Model own:fails_itself: the function failed with TypeError: 'int' object "
    r"is not subscriptable \(own.py, line \d+\): correct it; to debug it, call the function "
    "with num_labels=3.",
    "own:frozen": "The model has no parameter with requires_grad=True, so there is nothing to "
    "train: unfreeze some parameters.",
    "own:returns_dict": "The model returned a dict of logits, aux: a model must return logits, a "
    r"Tensor of \(4, 3\) for 4 images; the function given with --model must make a model that "
    "returns only its logits.",
    "own:too_few": "The model returned 2 outputs per image, but --num_labels is 3: they must be "
    "equal; build the last layer with num_labels, or give --num_labels 2.",
    "own:fails_in_forward": r"The model failed with RuntimeError: shape '\[7, 7\]' is invalid for "
    r"input of size 12 \(own.py, line \d+\): correct it; to debug it, call the model with "
    r"torch.zeros\(4, 3, 32, 32\).",
}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "broken.py").write_text("import torch\n\noops\n")
    return write_model(tmp_path, monkeypatch, OWN)


@pytest.mark.parametrize("model", AT_ONCE)
def test_a_model_that_cant_be_is_refused_before_anything_is_written(
    model: str, here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    bad = Bad(command=f"{NULL} --model {model}", message=AT_ONCE[model])
    require_answer(bad, here, capfd)


def test_the_real_command_refuses_a_model_that_isnt_there(here: Path) -> None:
    bad = Bad(command=f"{NULL} --model nowhere:net", message=AT_ONCE["nowhere:net"])
    require_run_answer(bad, here)


@pytest.mark.parametrize("model", LATER)
def test_what_only_a_worker_sees_of_a_model_is_a_sentence_too(
    model: str, here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    bad = Bad(command=f"{NULL} --model {model}", message=RANK_PREFIX + LATER[model], writes=True)
    require_answer(bad, here, capfd)


def test_a_step_that_needs_more_memory_than_there_is_says_what_to_make_smaller(
    here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    message = (
        RANK_PREFIX + r"Out of memory in a step, which asked for \d+ bytes: give a smaller "
        "--batch_size or --image_size, or spread the batch over more GPUs or machines."
    )
    for words in ("--model own:too_large", "--model own:net --image_size 9999999"):
        require_answer(
            Bad(command=f"{NULL} {words}", message=message, status=1, writes=True), here, capfd
        )


def test_a_batch_norm_of_a_single_image_is_a_sentence(
    here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = f"{NULL} --model resnet18 --batch_size 1"
    message = (
        RANK_PREFIX
        + r"A BatchNorm got only one value per channel in training \(.*\), too few for a "
        "variance: give a larger --batch_size, fewer workers, or --sync_bn, which computes it over "
        "the values of all workers."
    )
    require_answer(Bad(command=words, message=message, writes=True), here, capfd)


class Malicious:
    """Calls what it likes when it is unpickled."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return print, ("you are mine",)


WEIGHTS = {
    "none.pt": (2, "--weights none.pt: there is no such file; check the path."),
    "garbage.pt": (
        2,
        "garbage.pt: not a file of weights; give one that a run, torch.save, safetensors or Caffe2 "
        "wrote.",
    ),
    "torn.pt": (
        2,
        r"torn.pt: torn or damaged \(an archive whose end is missing or unreadable: File is not a "
        r"zip file\); use another file, or a fresh copy of this one.",
    ),
    ".": (2, r"--weights \.: is a folder; give a file of weights."),
}
LATER_WEIGHTS = {
    "malicious.pt": (
        2,
        "malicious.pt: not a file of weights: loading it would call print, which could run any "
        r"code; give a file that holds a model's state_dict\(\) alone.",
    ),
    "other.pt": (
        2,
        "--weights other.pt: the weights belong to another model: missing 2.weight, "
        "2.bias; unknown 0.weight. Give the --model that they were trained with.",
    ),
}


@pytest.fixture
def weights(here: Path) -> Path:
    """The folder with files of weights."""
    (here / "garbage.pt").write_bytes(b"garbage" * 100)
    torch.save({"0.weight": torch.ones(3, 3)}, here / "other.pt")
    (here / "torn.pt").write_bytes((here / "other.pt").read_bytes()[:-100])
    torch.save({"2.weight": Malicious()}, here / "malicious.pt")
    return here


@pytest.mark.parametrize("file", WEIGHTS)
def test_weights_that_arent_are_refused_before_anything_is_written(
    file: str, weights: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    status, message = WEIGHTS[file]
    bad = Bad(
        command=f"{NULL} --model own:net --load_model_path {file}", message=message, status=status
    )
    require_answer(bad, weights, capfd)


@pytest.mark.parametrize("file", LATER_WEIGHTS)
def test_weights_that_dont_fit_or_would_run_code_are_refused(
    file: str, weights: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    status, message = LATER_WEIGHTS[file]
    words = f"{NULL} --model own:net --load_model_path {file}"
    require_answer(
        Bad(command=words, message=RANK_PREFIX + message, status=status, writes=True),
        weights,
        capfd,
    )
    assert "you are mine" not in capfd.readouterr().out

"""A configuration reaches the parts that it is about."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

import paceline
from paceline.cli.flags import parse
from paceline.comm.communicator import Communicator
from paceline.config.train import TrainConfig
from paceline.errors import ConfigError, PeerLost
from paceline.generation.run import Run
from paceline.recorder import NullRecorder, Recorder
from paceline.session import session as session_module
from paceline.session.checks import check
from paceline.session.command_trainer import build_trainer
from paceline.session.connect import connect_run
from paceline.session.recorders import record_training
from paceline.session.resume.start import Start
from paceline.session.sources import open_sources
from paceline.state.weights import save_weights
from paceline.trainer import Trainer
from paceline.wiring.model import make_model
from tests.harness.equivalence.rank_threads import run_ranks
from tests.harness.membership.given_membership import GivenMembership
from tests.harness.processes.sessions import session_of
from tests.harness.processes.worlds import run_of, world_of

BASE = (
    *("--train_data", "null", "--test_data", "null", "--epoch_size", "64"),
    *("--test_epoch_size", "10", "--model", "resnet20", "--image_size", "32"),
    *("--augment", "none", "--num_labels", "10", "--batch_size", "16", "--num_epochs", "4"),
)


RESOURCES = ExitStack()  # of the present test


@pytest.fixture(autouse=True)
def close_decode_pools() -> Iterator[None]:
    yield
    RESOURCES.close()


def config_of(*words: str) -> TrainConfig:
    return parse(TrainConfig, [*BASE, *words], prog="paceline train", description="")


def trainer_of(folder: Path, *words: str, start: Start | None = None) -> Trainer:
    return trainer_in(run_of(), folder, config_of(*words), start)


def trainer_in(run: Run, folder: Path, config: TrainConfig, start: Start | None = None) -> Trainer:
    """Return the trainer of a rank."""
    session = session_of(config, run, folder, RESOURCES, start)
    session.open_bindings()
    return build_trainer(config, session, open_sources(config))


def rates(trainer: Trainer) -> list[float]:
    """Return the learning rate of each step of the run."""
    factor: Any = trainer.schedule
    return [factor.base_lrs[0] * factor.lr_lambdas[0](step) for step in range(16)]


def test_a_gpu_that_is_to_decode_must_be_there(tmp_path: Path) -> None:
    refused = "--decode_device cuda: a GPU decodes only for the training on it, and this worker"
    with pytest.raises(ConfigError, match=refused):
        check(config_of("--decode_device", "cuda", "--use_cpu"), gpus=2)
    with pytest.raises(ConfigError, match=refused):
        trainer_of(tmp_path, "--decode_device", "cuda")
    assert trainer_of(tmp_path, "--decode_device", "auto").train.trial is None


def test_the_loader_has_the_data_that_the_flags_name(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path)
    assert (trainer.train.steps, trainer.train.samples) == (4, 64)
    assert trainer.test is not None
    assert trainer.test.samples == 10
    assert trainer.epochs == 4


def test_images_are_normalised_by_the_given_mean_and_deviation(tmp_path: Path) -> None:
    plain = trainer_of(tmp_path).train.batch(0, 0).images
    words = ("--image_mean_per_channel", "0", "--image_std_per_channel", "1", "2", "4")
    scaled = trainer_of(tmp_path, *words).train.batch(0, 0).images
    divisor = torch.tensor([1.0, 2.0, 4.0]).view(1, 3, 1, 1)
    torch.testing.assert_close(scaled * divisor, plain * 128 + 128, rtol=0, atol=1e-2)


@pytest.mark.parametrize(("words", "channels_last"), [((), True), (("--no_channels_last",), False)])
def test_memory_is_laid_out_as_asked(
    tmp_path: Path, words: tuple[str, ...], channels_last: bool
) -> None:
    trainer = trainer_of(tmp_path, *words)
    layout = torch.channels_last if channels_last else torch.contiguous_format
    assert trainer.train.batch(0, 0).images.is_contiguous(memory_format=layout)
    assert all(
        p.is_contiguous(memory_format=layout) for p in trainer.model.parameters() if p.ndim == 4
    )


def test_the_optimizer_has_rate_momentum_and_decay(tmp_path: Path) -> None:
    words = ("--base_learning_rate", "0.5", "--momentum", "0.8", "--weight_decay", "0.01")
    groups = trainer_of(tmp_path, *words).optimizer.param_groups
    assert [group["lr"] for group in groups] == [0.5, 0.5]
    assert [group["weight_decay"] for group in groups] == [0.01, 0]
    assert all(group["momentum"] == 0.8 and group["nesterov"] for group in groups)
    scales = len(groups[0]["params"])
    fewer = trainer_of(tmp_path, "--no_bn_decay").optimizer.param_groups
    assert scales - len(fewer[0]["params"]) == 19  # BatchNorms of a ResNet-20
    assert not trainer_of(tmp_path, "--momentum", "0").optimizer.param_groups[0]["nesterov"]


def test_the_schedule_follows_policy_warm_up_and_linear_rule(tmp_path: Path) -> None:
    cosine = rates(trainer_of(tmp_path, "--lr_policy", "cosine"))
    assert cosine[0] == pytest.approx(0.1)
    assert cosine[8] == pytest.approx(0.05)
    assert rates(trainer_of(tmp_path, "--warmup_epochs", "2"))[:3] == pytest.approx(
        [0.1 / 8, 0.2 / 8, 0.3 / 8]
    )
    assert rates(trainer_of(tmp_path, "--scale_lr"))[0] == pytest.approx(0.1 * 16 / 256)


@pytest.mark.parametrize("origin", [None, "another run's"])
def test_more_epochs_of_a_run_have_their_own_schedule(tmp_path: Path, origin: str | None) -> None:
    short = trainer_of(tmp_path, "--lr_policy", "cosine", "--num_epochs", "2")
    for _ in range(4):
        short.optimizer.step()
        short.schedule.step()
    names = ("model", "optimizer", "schedule", "precision")
    state = {name: getattr(short, name).state_dict() for name in names}
    state["position"] = {"epoch": 1, "step": 0, "number": 4, "sums": [], "best": None}
    start = Start(state=state, origin=origin)
    longer = trainer_of(tmp_path, "--lr_policy", "cosine", start=start)
    whole = rates(trainer_of(tmp_path, "--lr_policy", "cosine"))
    assert rates(longer) == whole
    groups = longer.optimizer.param_groups
    assert [group["lr"] for group in groups] == longer.schedule.get_last_lr() == [whole[4]] * 2


def test_the_loss_is_smoothed_as_asked(tmp_path: Path) -> None:
    criterion: Any = trainer_of(tmp_path, "--label_smoothing", "0.1").criterion
    assert criterion.label_smoothing == 0.1


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [("float", torch.float32), ("bfloat16", torch.bfloat16), ("float16", torch.float16)],
)
def test_forward_computes_in_the_asked_precision(
    tmp_path: Path, dtype: str, expected: torch.dtype
) -> None:
    trainer = trainer_of(tmp_path, "--dtype", dtype, "--force_bfloat16")
    with trainer.precision.forward():
        assert torch.nn.functional.linear(torch.ones(1, 2), torch.ones(3, 2)).dtype is expected


def test_the_size_of_a_bucket_decides_how_many_there_are(tmp_path: Path) -> None:
    def buckets(size: str, *flags: str) -> int:
        trainer = trainer_of(tmp_path, "--bucket_mb", size, *flags)
        return len(trainer.replica._binding.buckets)

    sharded = ("--sync", "notified", "--update", "sharded")
    assert buckets("100", *sharded) == 3  # with decay, without, and the first layers with it
    assert buckets("0.1", *sharded) > 8
    assert buckets("0.1") == 2  # with decay, and without: one rank exchanges nothing


def test_the_seed_decides_the_weights_and_the_order(tmp_path: Path) -> None:
    one, same, other = (trainer_of(tmp_path, "--seed", seed) for seed in ("1", "1", "2"))
    weights = [next(t.model.parameters()) for t in (one, same, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    images = [t.train.batch(0, 0).images for t in (one, same, other)]
    assert torch.equal(images[0], images[1])
    assert not torch.equal(images[0], images[2])


def test_given_weights_are_where_training_starts(tmp_path: Path) -> None:
    model = trainer_of(tmp_path, "--seed", "5").model
    save_weights(tmp_path / "w.pt", model)
    notes: list[str] = []
    config = config_of("--load_model_path", str(tmp_path / "w.pt"))
    started = make_model(config, torch.device("cpu"), report=notes.append)
    for name, value in model.state_dict().items():
        assert torch.equal(value, started.state_dict()[name])
    assert notes == [f"{tmp_path / 'w.pt'}: the model begins with all of its weights."]


def test_an_epoch_trains_evaluates_steps_the_schedule_and_saves(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, "--num_epochs", "2", "--lr_policy", "cosine")
    modes: list[bool] = []
    trainer.model.register_forward_hook(lambda module, args, out: modes.append(module.training))
    trainer.run()
    assert modes == [*[True] * 4, False, *[True] * 4, False]
    assert trainer.schedule.get_last_lr()[0] == pytest.approx(0)
    saved = torch.load(tmp_path / "resnet20_model.pt", weights_only=True)
    for name, value in trainer.model.state_dict().items():
        assert torch.equal(saved[name], value)
    about = saved.about
    known = {name: about[name] for name in ("model", "num_labels", "image_size", "workers")}
    assert known == {"model": "resnet20", "num_labels": 10, "image_size": 32, "workers": 1}


@pytest.mark.parametrize(
    ("words", "gpus", "told"),
    [
        (["--num_gpus", "2"], 1, "GPU 1 does not exist: this machine has 1"),
        (["--gpus", "0,3"], 2, "GPU 3 does not exist"),
    ],
)
def test_gpus_that_are_not_there_are_refused(words: list[str], gpus: int, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        check(config_of(*words), gpus)


def test_what_gpus_cannot_do_is_refused_to_them_alone() -> None:
    for words, told in {
        ("--update", "sharded"): "--update sharded supports CPUs only.*--update replicated",
        ("--wire", "bf16"): "--wire bf16 needs --sync notified, .*set --sync notified",
        (
            "--connections",
            "2",
        ): "--connections 2 needs --sync notified, .*or leave out --connections",
    }.items():
        with pytest.raises(ConfigError, match=told):
            check(config_of(*words, "--num_gpus", "1"), gpus=1)
        check(config_of(*words, "--use_cpu"), gpus=1)
    for words in ((), ("--sync", "notified", "--wire", "bf16")):
        check(config_of(*words, "--num_gpus", "1"), gpus=1)


def requires_later_looks(
    membership: GivenMembership, recorder: Recorder, folder: Path, **step: object
) -> None:
    """Require that a member that is stopped after an early look at the lease writes no result."""
    looks: list[str] = []

    def contents() -> list[bytes]:
        return [path.read_bytes() for path in folder.rglob("*") if path.is_file()]

    def require_member() -> None:
        looks.append("require")
        if "lasts" in looks:
            raise PeerLost("outside")

    def lease_lasts() -> bool:
        looks.append("lasts")
        return False

    membership._require_member, membership._lease_lasts = require_member, lease_lasts
    before = contents()
    with pytest.raises(PeerLost, match="outside"):
        recorder.event("step", **step)
    assert looks == ["require", "require", "lasts", "require"]
    assert contents() == before


STEP = {"generation": 0, "step": 0, "epoch": 0, "first": 0, "last": 8, "cuts": [0, 8], "skipped": 0}


def test_a_trainers_files_have_no_result_of_a_process_that_was_stopped_meanwhile(
    tmp_path: Path,
) -> None:
    run = run_of()
    run.membership = membership = GivenMembership()
    with ExitStack() as resources:
        record_training(config_of(), session_of(config_of(), run, tmp_path, resources))
        requires_later_looks(membership, run.recorder, tmp_path, **STEP)


def test_a_scripts_files_have_no_result_of_a_process_that_was_stopped_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    membership = GivenMembership()
    monkeypatch.setattr(
        session_module, "join_membership", lambda group, *_, **__: (group, membership)
    )
    monkeypatch.setattr(session_module, "watch_peers", lambda *_, **__: membership)
    with paceline.join(run=tmp_path / "run") as world:
        requires_later_looks(membership, world._run.recorder, tmp_path / "run", **STEP)
        membership._require_member = lambda: None


def test_a_trainers_checkpoints_ask_whether_its_member_is_in_the_world(tmp_path: Path) -> None:
    run = run_of()
    config = config_of("--num_epochs", "1")
    answers = {"may write": True, "lasts": False}

    def may_write() -> bool:
        may, answers["may write"] = answers["may write"], False
        return may

    run.membership = GivenMembership(may_write=may_write, lease_lasts=lambda: answers["lasts"])
    trainer_in(run, tmp_path, config).run()
    assert not answers["may write"]
    assert not list(tmp_path.rglob("step-*.pt"))


def test_timeouts_reach_the_connections() -> None:
    store = HashStore()

    def on_rank(own: Communicator) -> list[float]:
        group, cpu = world_of((2,), own.rank), torch.device("cpu")
        with connect_run(group, store, cpu, (7.0, 3.0)) as run:
            communicator: Any = run.context.group("data", "steps")
            limits = [communicator.timeout.seconds]
            run.context.end_startup()
            return [*limits, communicator.timeout.seconds]

    assert run_ranks(2, on_rank) == [[7, 3]] * 2


def test_rounds_longer_than_the_run_are_refused_and_those_longer_than_an_epoch_noted(
    tmp_path: Path,
) -> None:
    words = ("--sync", "average", "--num_epochs", "2", "--average_every")
    steps = trainer_of(tmp_path).train.steps
    with pytest.raises(ConfigError, match=rf"average_every 99: .* the run's {2 * steps} steps"):
        trainer_of(tmp_path, *words, "99")
    config, recorder = config_of(*words, f"{2 * steps}"), Notes()
    trainer_in(run_of(recorder=recorder), tmp_path, config)
    assert any(f"more than the {steps} steps of an epoch" in text for text in recorder.texts)


class Notes(NullRecorder):
    """Recorder of the notes' texts."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def event(self, name: str, **fields: object) -> None:
        if name == "note":
            self.texts.append(str(fields["text"]))

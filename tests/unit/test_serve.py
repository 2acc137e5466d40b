"""`paceline serve`: its options, and what a server refuses."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from importlib import metadata
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed import HashStore

from paceline.cli.main import main
from paceline.cluster.rendezvous.server_registration import (
    Invitation,
    InvitedBucket,
    open_start,
    serve_command,
)
from paceline.cluster.stores.folder_store import FolderStore
from paceline.config.average import AverageConfig
from paceline.config.world import SyncConfig
from paceline.errors import CommError, ConfigError
from paceline.reduce.put_engine.layout import BucketSpec, Topology, lay_out
from paceline.server.average_server import digest_of, refuse_server
from paceline.server.serve import layout_of, refusal
from paceline.update.outer.average import Average, average_from_flags, parse_average


def invitation() -> Invitation:
    """Make an invitation to serve three workers on two machines."""
    spec = BucketSpec(lengths=(100,), dtype=torch.float64)
    return Invitation(
        version=metadata.version("paceline"),
        token="token",
        purpose="window",
        workers_per_machine=(2, 1),
        names=("rank 0", "rank 1", "rank 2"),
        buckets=(InvitedBucket(numel=100, dtype="float64", encoded=False, suppresses_zeros=False),),
        wire="fp32",
        connections=1,
        model="0123abcd",
        size=lay_out([spec], Topology.of([2, 1]).served_by("it")).server_size,
        timeout=10.0,
    )


def test_flags_arguments_and_the_short_form_say_the_same() -> None:
    served = Average(through="server")
    assert average_from_flags("average", AverageConfig(average_through="server")) == served
    assert parse_average("average:through=server") == served
    assert served.facts()["through"] == "server"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("serve", "paceline serve needs --run_id, the name of the run whose weights it merges."),
        (
            "serve --run_id r",
            "paceline serve needs the run's rendezvous: use --file_store_path, --redis_host, "
            "--redis_url, --etcd or --master, as the run does.",
        ),
        (
            "serve --run_id r --model net",
            "--model net: must be a model's digest, eight hexadecimal digits; copy it from the "
            "line that a server prints, or leave it out to serve any.",
        ),
        (
            "serve --run_id r --master h:1 --redis_host h",
            "--redis_host and --master select different rendezvous methods: use one.",
        ),
        (
            "train --train_data null --sync average --average_server apart",
            "--average_server apart: there is no server without a merge through one; leave it "
            "out, or give --average_through server.",
        ),
        (
            "train --train_data null --sync average --average_through server "
            "--average_server apart",
            "--average_server apart: the server finds the run by a rendezvous; add "
            "--file_store_path, --redis_host, --redis_url, --etcd or --master, and give paceline "
            "serve the same, or leave out --average_server.",
        ),
        (
            "train --train_data null --sync notified --average_through server",
            "--average_through server needs --sync average: with --sync notified workers exchange "
            "gradients in each step.",
        ),
    ],
)
def test_a_wrong_option_is_refused_before_anything_is_written(
    words: str,
    sentence: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(words.split()) == 2
    assert capsys.readouterr().err == f"paceline: {sentence}\n"
    assert not list(tmp_path.iterdir())


def test_a_server_whose_run_does_not_come_ends_within_its_timeout(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = f"serve --run_id wrong --file_store_path {tmp_path} --first_iter_timeout 0.2"
    assert main(words.split()) == 1
    said = capsys.readouterr().err
    assert "run 'wrong' didn't come within 0.2 s: start it with --run_id wrong, " in said
    assert not list(tmp_path.iterdir())


def test_nixl_has_no_server() -> None:
    config = SyncConfig(sync="average", transport="nixl")
    refuse_server(config, Average())
    with pytest.raises(ConfigError, match="by TCP, not by --transport nixl; leave out"):
        refuse_server(config, Average(through="server"))


def test_a_run_that_no_server_can_find_is_refused() -> None:
    with pytest.raises(ConfigError, match="this process was started alone: start it with"):
        open_start(HashStore())


def test_a_server_refuses_another_model_and_another_version() -> None:
    assert refusal(invitation()) == refusal(invitation(), "0123abcd") == ""
    assert "with --model 89abcdef, but the run trains model 0123abcd;" in refusal(
        invitation(), "89abcdef"
    )
    older = replace(invitation(), version="0.0.1")
    assert "the workers are of 0.0.1; install the same version" in refusal(older)


def test_the_digest_of_a_model_is_that_of_names_and_shapes() -> None:
    one, other = nn.Linear(3, 4), nn.Linear(3, 4)
    assert digest_of(one) == digest_of(other) != digest_of(nn.Linear(4, 3))
    assert digest_of(nn.Sequential(one)) != digest_of(one)


def test_an_invitation_that_was_sent_as_text_gives_the_workers_layout() -> None:
    read = Invitation.from_text(invitation().to_text())
    assert read == invitation()
    assert layout_of(read).topology.groups == ((0, 1), (2,), (3,))
    with pytest.raises(CommError, match="install the same version of Paceline on all machines"):
        layout_of(replace(read, size=1))


@pytest.mark.parametrize(
    ("address", "space", "command"),
    [
        ("/shared/meet", "paceline-a%20b/1f", "--run_id 'a b' --file_store_path /shared/meet"),
        ("10.0.0.5:29500", "paceline-r/1f", "--run_id r --master 10.0.0.5:29500"),
        ("redis://:pw@h:7000/0", "paceline-r/1f", "--run_id r --redis_host h --redis_port 7000"),
        ("rediss://h/0", "paceline-r/1f", "--run_id r --redis_host h"),
        ("http://u:pw@h:1,i:2", "paceline-r/1f", "--run_id r --etcd h:1,i:2"),
        ("https://u:pw@h:1?cacert=/x", "r/1f", "--run_id r --etcd 'https://h:1?cacert=/x'"),
    ],
)
def test_the_workers_name_the_command_of_the_server_without_a_password(
    address: str, space: str, command: str, tmp_path: Path
) -> None:
    store = FolderStore(str(tmp_path), "s", timedelta(seconds=1), make=True)
    store.address, store.space = address, space
    assert serve_command(store) == f"paceline serve {command}"

"""`paceline serve`: its options, and what a server refuses."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from dataclasses import replace
from datetime import timedelta
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import HashStore

from paceline.api.parallelize import idle_servers, number_of_servers
from paceline.cli.main import main
from paceline.cluster.membership.process_identity import ProcessIdentity
from paceline.cluster.rendezvous.server_registration import (
    AVERAGING,
    PARAMETERS,
    Invitation,
    InvitedBucket,
    RegisteredServer,
    Registration,
    WantedServers,
    announce_servers,
    await_servers,
    give_addresses,
    serve_command,
)
from paceline.cluster.stores.folder_store import FolderStore
from paceline.comm.transport import bootstrap
from paceline.config.average import AverageConfig
from paceline.config.server import Server, parse_server
from paceline.config.world import SyncConfig
from paceline.errors import CommError, ConfigError, PeerLost
from paceline.reduce.buckets import ALL, partition
from paceline.reduce.put_engine.layout import BucketSpec, Topology, lay_out
from paceline.server.found_servers import digest_of, refuse_server
from paceline.server.serve import layout_of, refusal, serve
from paceline.update.outer.average import Average, average_from_flags, parse_average
from paceline.wiring.exchange import refuse_idle_servers


def invitation() -> Invitation:
    """Make an invitation to serve three workers on two machines."""
    spec = BucketSpec(lengths=(100,), dtype=torch.float64)
    return Invitation(
        role=AVERAGING,
        number=0,
        servers=("the averaging server",),
        version=metadata.version("paceline"),
        token="token",
        purpose="window",
        workers_per_machine=(2, 1),
        names=("rank 0", "rank 1", "rank 2"),
        buckets=(
            InvitedBucket(
                lengths=(100,),
                dtype="float64",
                encoded=False,
                suppresses_zeros=False,
                returns_parameters=False,
                slots=1,
            ),
        ),
        optimizer="",
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
        ("serve", "paceline serve needs --run_id, the name of the run whose workers it serves."),
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
        (
            "train --train_data null --sync server --average_through server",
            "--average_through server needs --sync average: with --sync server workers exchange "
            "gradients in each step.",
        ),
        (
            "train --train_data null --sync server --num_servers 0",
            "--num_servers 0: must be at least 1.",
        ),
        ("launch --num_servers -1 -- true", "--num_servers -1: must be at least 0."),
        (
            "train --train_data null --sync notified --num_servers 2",
            "--num_servers 2: --sync notified exchanges gradients without parameter servers; leave "
            "it out, or use --sync server.",
        ),
        (
            "train --train_data null --parameter_servers apart",
            "--parameter_servers apart: --sync auto exchanges gradients without parameter servers; "
            "leave it out, or use --sync server.",
        ),
        (
            "train --train_data null --sync server --parameter_servers apart",
            "--parameter_servers apart: the server finds the run by a rendezvous; add "
            "--file_store_path, --redis_host, --redis_url, --etcd or --master, and give paceline "
            "serve the same, or leave out --parameter_servers.",
        ),
        (
            "train --train_data null --sync notified --staleness 2",
            "--staleness 2: --sync notified exchanges gradients without parameter servers; leave "
            "it out, or use --sync server.",
        ),
        (
            "train --train_data null --sync server --staleness -1",
            "--staleness -1: must be a whole number of at least 0, or async.",
        ),
        (
            "train --train_data null --sync server --staleness 2 --staleness_lr scale",
            "--staleness_lr scale: only asynchronous updates have rates of their own; leave it "
            "out, or use --staleness async.",
        ),
        *(
            (
                f"train --train_data null --epoch_size 8 --num_labels 3 --use_cpu --sync server "
                f"--staleness 2 {given}",
                f"{given}: it needs the gradients or samples of all workers "
                "at once, but with --staleness 2 these are in different steps; leave it out, or "
                "use --staleness 0.",
            )
            for given in ("--sync_bn True", "--clip_norm 1.0", "--clip_value 0.5")
        ),
        (
            "train --train_data null --sync server --wire int8",
            "--wire int8: parameter servers get gradients uncompressed; leave out --wire, or use "
            "--sync notified in place of server.",
        ),
        (
            "train --train_data null --sync server --update sharded",
            "--update sharded: parameter servers update all parameters; leave out --update, or use "
            "--sync notified in place of server.",
        ),
        (
            "train --train_data null --sync server --transport nixl",
            "--transport nixl: parameter servers exchange by TCP; leave out --transport, or use "
            "--sync notified in place of server.",
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


def test_a_server_stops_waiting_for_workers_that_have_begun_another_generation(
    tmp_path: Path,
) -> None:
    store = FolderStore(str(tmp_path), "start", timedelta(seconds=60), make=True)
    registration = Registration(
        process=ProcessIdentity.of_this_process(), addresses=("127.0.0.1",), port=0
    )
    registered = RegisteredServer(store, registration)
    # Rank 1 was lost before it gave its addresses, so that those of this window never come.
    present = invitation()
    newest = replace(present, purpose="another window")
    store.set(f"server/{registration.id}/invitation", newest.to_text())
    with closing(registered), pytest.raises(PeerLost, match="lost another worker"):
        serve(registered, present, limit=60.0, report=lambda line: None)
    assert registered.following(present) == newest


@contextmanager
def stopped_worker() -> Iterator[int]:
    """Yield a port at which a process listens that is stopped: the kernel accepts, and no more."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


@contextmanager
def gone_worker() -> Iterator[int]:
    """Yield a port at which no machine answers: the listener's queue is full."""
    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(2):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(listener.getsockname())
        yield listener.getsockname()[1]


@pytest.mark.parametrize("worker", [stopped_worker, gone_worker])
def test_a_server_stops_dialing_a_worker_where_the_others_have_begun_another_generation(
    worker: Callable[[], AbstractContextManager[int]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bootstrap, "_DIAL_S", 0.1)
    store = FolderStore(str(tmp_path), "start", timedelta(seconds=60), make=True)
    registration = Registration(
        process=ProcessIdentity.of_this_process(), addresses=("127.0.0.1",), port=0
    )
    registered = RegisteredServer(store, registration)
    present = invitation()
    with closing(registered), worker() as port:
        for number, where in enumerate(("", f"127.0.0.1 {port}")):  # local sockets, and TCP
            give_addresses(store, registration, "window", number, 3 * [where])
        newest = replace(present, purpose="another window")
        store.set(f"server/{registration.id}/invitation", newest.to_text())
        with pytest.raises(PeerLost, match="lost another worker while they connected"):
            serve(registered, present, limit=15.0, report=lambda line: None)


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


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.complex64])
def test_parameter_servers_lay_out_what_the_workers_do(dtype: torch.dtype) -> None:
    lengths = (40, 1, 59)
    spec = BucketSpec(lengths=lengths, dtype=dtype, returns_parameters=True, slots=3)
    layout = lay_out([spec], Topology.of([2, 1]).served_by("one", "other"))
    (bucket,) = invitation().buckets
    served = replace(
        invitation(),
        role=PARAMETERS,
        servers=("one", "other"),
        buckets=(
            replace(
                bucket,
                lengths=lengths,
                dtype=str(dtype).removeprefix("torch."),
                returns_parameters=True,
                slots=3,
            ),
        ),
        size=layout.server_size,
    )
    assert layout_of(Invitation.from_text(served.to_text())) == layout


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


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ("server:servers=1,servers=2", "'servers=2' must be an option, given once"),
        ("server:stale=1", "'stale=1' must be an option, given once: servers=N, staleness=N"),
        ("server:staleness_lr=half", "staleness_lr must be given or scale."),
        ("server:staleness=2,staleness_lr=scale", "only asynchronous updates have rates of their"),
        ("server:servers=0", "servers 0: must be a whole number of at least 1."),
        ("server:staleness=-1", "staleness must be a whole number of at least 0, or async."),
        ("server:staleness", "staleness must be a whole number of at least 0, or async."),
        ("server:servers=two", "servers must be a whole number of at least 1."),
    ],
)
def test_a_wrong_short_form_of_servers_is_refused(given: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_server(given)
    assert sentence in str(caught.value)


@pytest.mark.parametrize("staleness", [-1, 1.5, True, "async"])
def test_a_wrong_staleness_of_the_class_is_refused_with_all_allowed_values(staleness: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        Server(staleness=staleness)
    sentence = "must be a whole number of at least 0, or None: asynchronous."
    assert str(caught.value) == f"staleness {staleness}: {sentence}"


@pytest.mark.parametrize(
    ("announced", "remedy"),
    [(None, ""), (0, ", or let paceline launch start it by --num_servers 1")],
    ids=["by another launcher", "by paceline launch"],
)
def test_the_wait_for_a_server_names_what_starts_one(
    announced: int | None, remedy: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = FolderStore(str(tmp_path), "start", timedelta(seconds=60), make=True)
    if announced is not None:
        announce_servers(store, announced)
    wanted = WantedServers(role=PARAMETERS, count=1)
    with pytest.raises(CommError) as caught:
        await_servers(store, ProcessIdentity.of_this_process(), wanted, 0.01)
    command = f"start it with {serve_command(store)}{remedy}."
    assert str(caught.value) == f"the parameter server didn't come within 0.01 s: {command}"
    assert capsys.readouterr().err == f"paceline: waiting for the parameter server: {command}\n"


def test_the_short_form_of_servers_says_what_the_class_does() -> None:
    assert parse_server("server") == Server()
    assert parse_server("server:staleness=0,servers=3") == Server(servers=3)
    assert parse_server("server:staleness=2") == Server(staleness=2)
    scaled = parse_server("server:staleness=async,staleness_lr=scale")
    assert scaled == Server(staleness=None, staleness_lr="scale")
    assert parse_server("notified") is None


def test_fewer_servers_than_a_launcher_has_started_are_refused() -> None:
    store = HashStore()
    announce_servers(store, 2)
    with pytest.raises(ConfigError, match="servers=1: paceline launch started 2 servers"):
        number_of_servers(Server(servers=1), store)
    assert number_of_servers(Server(), store) == 2
    assert number_of_servers(Server(servers=3), store) == 3  # the third comes by paceline serve
    assert number_of_servers(Server(servers=1), HashStore()) == 1


def test_servers_that_a_launcher_has_started_for_another_exchange_are_named() -> None:
    store = HashStore()
    assert [*idle_servers(None), *idle_servers(store)] == []
    announce_servers(store, 0)
    assert [*idle_servers(store)] == []
    announce_servers(store, 2)
    (note,) = idle_servers(store)
    assert note.startswith("paceline launch started 2 servers with --num_servers 2, which")


def test_more_servers_than_a_bucket_has_parts_are_refused() -> None:
    model = nn.Linear(20, 2)  # 168 bytes: two cache lines, and some more
    names = {parameter: name for name, parameter in model.named_parameters()}
    buckets = partition(names, dict.fromkeys(names, 0), ALL)
    refuse_idle_servers(buckets, 2)
    with pytest.raises(ConfigError, match="--num_servers 3: the model's largest bucket can be cut"):
        refuse_idle_servers(buckets, 3)

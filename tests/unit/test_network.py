"""Which addresses are offered, tried and chosen."""

from __future__ import annotations

import socket
from contextlib import closing, suppress
from threading import Event

import pytest

from paceline.cluster.rendezvous.reachability import (
    ProbeListener,
    candidate_addresses,
    choose_addresses,
    listening_address,
    probe_peers,
)
from paceline.comm.addresses import interfaces
from paceline.errors import CommError, ConfigError

TOKEN = "0123456789abcdef"
LAN = {"lo": "127.0.0.1", "eth0": "10.0.0.5", "docker0": "172.17.0.1"}


def nap() -> None:
    """Pause: wait a moment for what never comes."""
    Event().wait(0.01)


def test_the_loopback_is_among_the_interfaces() -> None:
    assert interfaces()["lo"] == "127.0.0.1"


def test_all_interfaces_but_the_loopback_are_offered() -> None:
    assert candidate_addresses(LAN, ()) == ("10.0.0.5", "172.17.0.1")


@pytest.mark.parametrize(
    ("host", "interface_names", "address"),
    [
        ("127.0.0.1", (), "127.0.0.1"),
        ("localhost", ("eth0",), "127.0.0.1"),
        ("10.0.0.5", ("docker0",), "10.0.0.5"),
        ("192.0.2.1", (), ""),  # such as a router's, which leads here
        ("192.0.2.1", ("eth0",), "10.0.0.5"),
        ("no-such-host.invalid", ("eth0",), "10.0.0.5"),
    ],
)
def test_a_store_listens_on_the_interface_of_its_address_alone(
    host: str, interface_names: tuple[str, ...], address: str
) -> None:
    assert listening_address(host, LAN, interface_names) == address


def test_named_interfaces_alone_are_offered_in_their_order() -> None:
    assert candidate_addresses(LAN, ("docker0", "lo")) == ("172.17.0.1", "127.0.0.1")


def test_an_interface_that_isnt_there_is_refused_with_those_that_are() -> None:
    with pytest.raises(ConfigError, match=r"interfaces ib0: .*it has lo, eth0, docker0"):
        candidate_addresses(LAN, ("ib0",))


def test_a_machine_without_a_network_is_told_so() -> None:
    with pytest.raises(ConfigError, match=r"The only network interface"):
        candidate_addresses({"lo": "127.0.0.1"}, ())


def test_a_peer_is_reached_at_the_addresses_where_it_listens() -> None:
    with closing(ProbeListener()) as listener:
        listener.answer(TOKEN, 1)
        # 127.0.0.9 reaches the listener, too; at port 1 no process listens.
        peers = {1: (["127.0.0.1", "127.0.0.9"], listener.port), 2: (["127.0.0.1"], 1)}
        assert probe_peers(TOKEN, 0, peers, nap) == {1: ["127.0.0.1", "127.0.0.9"], 2: []}


def test_a_peer_that_answers_late_is_reached() -> None:
    with closing(ProbeListener()) as listener:
        naps = iter(range(1000))

        def pause() -> None:
            if next(naps) == 3:
                listener.answer(TOKEN, 1)
            nap()

        assert probe_peers(TOKEN, 0, {1: (["127.0.0.1"], listener.port)}, pause) == {
            1: ["127.0.0.1"]
        }


def test_a_wait_for_peers_can_be_ended() -> None:
    def interrupted() -> None:
        raise InterruptedError

    with closing(ProbeListener()) as listener, pytest.raises(InterruptedError):
        probe_peers(TOKEN, 0, {1: (["127.0.0.1"], listener.port)}, interrupted)


def test_another_machine_behind_an_address_is_not_taken_for_the_peer() -> None:
    with closing(ProbeListener()) as listener:
        listener.answer(TOKEN, 3)
        assert probe_peers(TOKEN, 0, {1: (["127.0.0.1"], listener.port)}, nap) == {1: []}


def test_another_runs_machine_is_not_taken_for_the_peer() -> None:
    with closing(ProbeListener()) as listener:
        listener.answer("another token", 1)
        assert probe_peers(TOKEN, 0, {1: (["127.0.0.1"], listener.port)}, nap) == {1: []}


def test_strangers_get_no_answer_and_stop_nobody() -> None:
    with closing(ProbeListener()) as listener:
        listener.answer(TOKEN, 1)
        for message in (b"GET / HTTP/1.1\r\n\r\n".ljust(48), b"x" * 1000, b""):
            with socket.create_connection(("127.0.0.1", listener.port), timeout=5) as stranger:
                answer = b""
                with suppress(OSError):  # the listener may close before it has read everything
                    stranger.sendall(message)
                    stranger.shutdown(socket.SHUT_WR)
                    answer = stranger.recv(100)
                assert answer == b""
        assert probe_peers(TOKEN, 0, {1: (["127.0.0.1"], listener.port)}, nap) == {1: ["127.0.0.1"]}


def test_each_machines_address_is_the_first_that_all_others_reached() -> None:
    offered = [["10.0.0.1", "10.9.0.1"], ["172.17.0.1", "10.0.0.2"], ["10.0.0.3"]]
    reached = [
        {1: ["10.0.0.2"], 2: ["10.0.0.3"]},
        {0: ["10.0.0.1", "10.9.0.1"], 2: ["10.0.0.3"]},
        {0: ["10.9.0.1"], 1: ["172.17.0.1", "10.0.0.2"]},
    ]
    assert choose_addresses(offered, reached) == ("10.9.0.1", "10.0.0.2", "10.0.0.3")


def test_a_machine_that_another_cant_reach_is_named_with_it() -> None:
    reached = [{1: ["10.0.0.2"], 2: []}, {0: ["10.0.0.1"], 2: ["10.0.0.3"]}]
    reached.append({0: ["10.0.0.1"], 1: ["10.0.0.2"]})
    with pytest.raises(CommError, match=r"machine 0 can reach \(it has 10.0.0.3\)"):
        choose_addresses([["10.0.0.1"], ["10.0.0.2"], ["10.0.0.3"]], reached)

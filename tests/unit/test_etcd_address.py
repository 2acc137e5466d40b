"""The text of --etcd: endpoints, user and password, TLS, and what can't be read."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.cluster.stores.etcd_address import EtcdAddress
from paceline.cluster.stores.store_spec import StoreSpec
from paceline.config.world import WorldConfig, without_password
from paceline.errors import ConfigError


def test_endpoints_are_read() -> None:
    assert EtcdAddress.of("a:1") == EtcdAddress(endpoints=("a:1",))
    assert EtcdAddress.of("a:1,[::1]:2379").endpoints == ("a:1", "[::1]:2379")
    each = EtcdAddress.of("https://a:1,https://b:2")
    assert (each.endpoints, each.tls) == (("a:1", "b:2"), True)


def test_user_password_and_files_are_read_and_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    address = EtcdAddress.of("https://me:s%40e%2Ccret@a:1,b:2?cacert=ca.pem&cert=c&key=k")
    assert address == EtcdAddress(
        endpoints=("a:1", "b:2"),
        tls=True,
        user="me",
        password="s@e,cret",
        cacert=f"{tmp_path}/ca.pem",
        cert=f"{tmp_path}/c",
        key=f"{tmp_path}/k",
    )
    assert EtcdAddress.of(address.text) == address
    assert "cret" not in repr(address)


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("a", "must be HOST:PORT, or several"),
        ("a:", "must be HOST:PORT, or several"),
        (":1", "must be HOST:PORT, or several"),
        ("a:70000", "must be HOST:PORT, or several"),
        ("a:1,", "must be HOST:PORT, or several"),
        ("::1:2379", "must be HOST:PORT, or several"),
        ("a:1/x", "must be HOST:PORT, or several"),
        ("http://a:1,https://b:2", "must be HOST:PORT, or several"),
        ("redis://a:1", "must begin with HOST:PORT, http:// or https://"),
        ("https://a:1?ca=x", "are cacert, cert and key"),
        ("https://a:1?cacert=", "are cacert, cert and key"),
        ("a:1?cacert=x", "cacert needs https://"),
        ("https://a:1?cert=x", "needs both cert and key"),
    ],
)
def test_an_address_that_cannot_be_read_is_a_sentence(text: str, rule: str) -> None:
    with pytest.raises(ConfigError, match=rf"--etcd \S+: .*{rule}.*; give it as HOST:PORT"):
        StoreSpec.of(WorldConfig(etcd=text), "space")


@pytest.mark.parametrize("text", ["me:se?cret@a", "https://me:se?cret@a", "me:se@cret@a"])
def test_a_message_has_no_password(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        EtcdAddress.of(text)
    assert "cret" not in str(caught.value)


def test_a_password_is_taken_out_of_an_address() -> None:
    assert without_password("https://u:p@a:1,b:2?cacert=x") == "https://a:1,b:2?cacert=x"
    assert without_password("u:p@a:1") == "a:1"
    assert without_password("u:p://x@a:1") == "a:1"
    assert without_password("a:1,b:2") == "a:1,b:2"


def test_the_flag_is_a_rendezvous() -> None:
    spec = StoreSpec.of(WorldConfig(etcd="a:1,b:2", num_shards=2, run_id="r"), "space")
    assert spec is not None
    assert (spec.kind, spec.address, spec.served_by_run) == ("etcd", "http://a:1,b:2", False)
    with pytest.raises(ConfigError, match="--etcd and --master select different rendezvous"):
        WorldConfig(etcd="a:1", master="b:1")
    with pytest.raises(ConfigError, match="--file_store_path and --etcd select different"):
        WorldConfig(etcd="a:1", file_store_path="/x")

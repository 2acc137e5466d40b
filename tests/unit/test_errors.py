"""An error's fields, and how each surface calls the options in its sentence."""

from __future__ import annotations

import pickle

from paceline.errors import ConfigError, Message, PeerLost


def as_argument(option: str) -> str:
    return {"run_id": "run"}.get(option, option)


def test_a_config_error_renders_value_rule_and_remedy() -> None:
    error = ConfigError(
        flag="bucket_mb", value=0, rule="must be at least 1", remedy=Message("see {--sync}")
    )
    assert str(error) == "--bucket_mb 0: must be at least 1; see --sync."
    assert (error.flag, error.value, str(error.rule)) == ("bucket_mb", 0, "must be at least 1")


def test_without_a_remedy_the_sentence_ends_at_the_rule() -> None:
    assert str(ConfigError(flag="sync", value="x", rule="no such method")) == (
        "--sync x: no such method."
    )


def test_the_library_calls_options_by_its_arguments() -> None:
    error = ConfigError(Message("give another {--run_id} than {}", "{--x}"))
    assert str(error) == "give another --run_id than {--x}"
    error.name_of = as_argument
    assert str(error) == "give another run than {--x}"


def test_a_lost_peer_is_the_same_in_another_operation() -> None:
    error = PeerLost(rank=0, peer=1, operation="bucket 3 in step 7", cause="it ended")
    assert str(error) == "rank 0 lost rank 1 in bucket 3 in step 7: it ended."
    assert str(error.during("the end")) == "rank 0 lost rank 1 in the end: it ended."


def test_braces_of_a_value_stay_as_they_are() -> None:
    assert str(ConfigError(flag="model", value="{}", rule="unknown")) == "--model {}: unknown."


def test_an_error_survives_pickling() -> None:
    error = pickle.loads(pickle.dumps(ConfigError("a plain sentence.")))
    assert str(error) == "a plain sentence."

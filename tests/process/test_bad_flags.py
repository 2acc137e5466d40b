"""Commands and flags that can't be: each is refused with a sentence before anything is written."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness.processes.bad_inputs import (
    NULL,
    Bad,
    require_answer,
    require_run_answer,
    sections,
)

COMMANDS = {
    "unknown command": Bad(words="trian", said=r"no command 'trian': did you mean train\?"),
    "nothing like a command": Bad(
        words="fly", said="no command 'fly': there are train, launch, db, ledger."
    ),
    "unknown command of db": Bad(
        words="db creat a b", said=r"no command 'db creat': did you mean create\?"
    ),
    "launch of nothing": Bad(
        words="launch -n 2 --",
        said="there is no command: give one, as in paceline launch -n 2 -- python train.py.",
    ),
    "launch of no program": Bad(
        words="launch -n 2 -- nowhere",
        said="the command nowhere isn't found: give a program, as in paceline launch -n 2 -- "
        "python train.py.",
    ),
    "launch of no number": Bad(
        words="launch -n two -- true",
        said="Error parsing --num_workers: 'two' must be a whole number, such as 32.",
    ),
    "ledger of nothing": Bad(
        words="ledger",
        said="Error parsing LedgerConfig: paceline ledger: a run folder or run id is required.",
    ),
}
FLAGS = {
    "nothing like a flag": Bad(
        words="--nonsense 3",
        said="Unrecognized options: --nonsense, 3",
    ),
    "a stray word": Bad(words="stray", said="Unrecognized options: stray"),
    "no value": Bad(
        words="--batch_size",
        said="Missing value for argument '--batch_size'. Expected 1 values.",
    ),
    "an empty value": Bad(
        words="--batch_size ''",
        said="Error parsing --batch_size: '' must be a whole number, such as 32.",
    ),
    "not a number": Bad(
        words="--batch_size many",
        said="Error parsing --batch_size: 'many' must be a whole number, such as 32.",
    ),
    "not a whole number": Bad(
        words="--batch_size 2.5",
        said="Error parsing --batch_size: '2.5' must be a whole number, such as 32.",
    ),
    "not a float": Bad(
        words="--weight_decay much",
        said="Error parsing --weight_decay: 'much' must be a number, such as 0.1.",
    ),
    "out of range": Bad(
        words="--momentum 1.5",
        said=r"Error parsing optim: --momentum 1.5: must be at least 0 and less than 1\.",
    ),
    "negative": Bad(
        words="--batch_size -4", said="Error parsing optim: --batch_size -4: must be at least 1."
    ),
    "nan": Bad(
        words="--max_loss nan", said="Error parsing optim: --max_loss nan: must be at least 0."
    ),
    "infinite": Bad(
        words="--timeout inf",
        said="Error parsing world: --timeout inf: must be greater than 0 and finite.",
    ),
    "not a choice": Bad(
        words="--dtype double",
        said=r"invalid choice 'double' for argument '--dtype'. Expected one of \('float', "
        r"'float16', 'bfloat16'\).",
    ),
    "contradictory": Bad(
        words="--num_gpus 2 --num_workers 2",
        said="Error parsing world: --num_gpus 2 and --num_workers 2 are redundant: use one "
        "of them.",
    ),
    "two rendezvous": Bad(
        words="--redis_host h --master h:1",
        said="Error parsing world: --redis_host and --master select different rendezvous "
        "methods: use one.",
    ),
    "a flag that needs another": Bad(
        words="--num_shards 2 --master node0:29500",
        said="Error parsing world: --num_shards 2 needs --run_id, the same on all machines.",
    ),
    "a machine out of range": Bad(
        words="--num_shards 2 --shard_id 2 --master node0:29500 --run_id r",
        said="Error parsing world: --shard_id 2: must be 0 to 1 with --num_shards 2.",
    ),
    "a port out of range": Bad(
        words="--redis_host h --redis_port 99999",
        said=r"Error parsing world: --redis_port 99999: must be from 1 to 65535\.",
    ),
    "a run's name that is a path": Bad(
        words="--run_id ../r",
        said=r"Error parsing world: --run_id '\.\./r': the value is used as a file name; use "
        r"printable characters except / and \\, and not only blanks and dots\.",
    ),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_that_cant_be_is_a_sentence(
    name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    require_answer(COMMANDS[name], tmp_path, capfd)


@pytest.mark.parametrize("name", FLAGS)
def test_a_flag_that_cant_be_is_a_sentence(
    name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    bad = FLAGS[name]
    require_answer(Bad(words=NULL + bad.words, said=bad.said), tmp_path, capfd)


def test_a_mistyped_flag_names_the_nearest_one(tmp_path: Path) -> None:
    bad = Bad(words=NULL + "--batch_sise 3", said="Unrecognized options: --batch_sise, 3")
    ended = require_run_answer(bad, tmp_path)
    assert sections(ended.text)[1].startswith("Perhaps you meant: --batch_size INT")

"""The help of the commands: whole paragraphs, defaults only where there is one, hints."""

from __future__ import annotations

import re

import pytest

from paceline.cli.main import main

COMMANDS = [
    *("train", "launch", "serve", "stop", "status", "ledger", "plan", "plot", "zoo"),
    *("db create", "db convert", "db info"),
]


def help_of(command: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit):
        main([*command.split(), "--help"])
    return capsys.readouterr().out


@pytest.fixture
def columns(monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setenv("COLUMNS", "80")
    return 80


@pytest.mark.parametrize("command", COMMANDS)
def test_no_line_of_help_is_wider_than_the_terminal(
    command: str, columns: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert [line for line in help_of(command, capsys).splitlines() if len(line) > columns] == []


@pytest.mark.parametrize("command", COMMANDS)
def test_a_default_is_shown_only_where_there_is_one(
    command: str, columns: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert not re.search(r"default: *(''|\)|MISSING)", help_of(command, capsys))


def test_the_help_of_an_option_is_one_paragraph(
    columns: int, capsys: pytest.CaptureFixture[str]
) -> None:
    text = " ".join(help_of("launch", capsys).replace("│", " ").split())
    assert "On a machine without GPUs, this is the number of CPU workers." in text


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (
            "train --train_data x --lr 0.1",
            "--lr: there is no such option; use --base_learning_rate.",
        ),
        ("launch --nproc-per-node=2 -- true", "--nproc_per_node: .*; use --num_workers."),
        ("launch --nnodes 2 -- true", "--nnodes: .*; use --num_shards."),
    ],
)
def test_a_flag_of_another_program_names_ours(
    words: str, hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words.split()) == 2
    assert re.search(f"^paceline: {hint}$", capsys.readouterr().err, re.M)

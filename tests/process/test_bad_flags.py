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
    "unknown command": Bad(command="trian", message=r"no command 'trian': did you mean train\?"),
    "nothing like a command": Bad(
        command="fly",
        message="no command 'fly': there are train, launch, serve, evaluate, predict, export, "
        "runs, compare, plot, zoo, db, stop, status, ledger, plan.",
    ),
    "unknown command of db": Bad(
        command="db creat a b", message=r"no command 'db creat': did you mean create\?"
    ),
    "launch of nothing": Bad(
        command="launch -n 2 --",
        message="there is no command: give one, as in paceline launch -n 2 -- python train.py.",
    ),
    "launch of no program": Bad(
        command="launch -n 2 -- nowhere",
        message="the command nowhere isn't found: give a program, as in paceline launch -n 2 -- "
        "python train.py.",
    ),
    "launch of no number": Bad(
        command="launch -n two -- true",
        message="Error parsing --num_workers: 'two' must be a whole number, such as 32.",
    ),
    "ledger of nothing": Bad(
        command="ledger",
        message="A run folder or run id is required, as in paceline ledger runs/my-run.",
    ),
}
FLAGS = {
    "mixed images of a GPU": Bad(
        command="--mixup 0.2 --decode_device auto",
        message="--mixup 0.2: doesn't go with --decode_device auto: processes mix images; leave "
        "one of them out.",
    ),
    "mixed images of stages": Bad(
        command="--mixup 0.2 --stages 2 --num_workers 2",
        message="--mixup 0.2: doesn't go with --stages 2: stages compute the loss of plain labels; "
        "leave it out.",
    ),
    "an average without end": Bad(
        command="--ema 1", message=r"--ema 1.0: must be at least 0 and less than 1\."
    ),
    "an average of weights that differ": Bad(
        command="--ema 0.9 --sync average --num_workers 2",
        message="--ema 0.9: doesn't go with --sync average, where workers have different weights; "
        "leave one of them out.",
    ),
    "an average of stages": Bad(
        command="--ema 0.9 --stages 2 --num_workers 2",
        message="--ema 0.9: doesn't go with --stages 2: a stage has no part of the average; leave "
        "it out.",
    ),
    "nothing like a flag": Bad(
        command="--nonsense 3",
        message="Unrecognized options: --nonsense, 3",
    ),
    "a stray word": Bad(command="stray", message="Unrecognized options: stray"),
    "no value": Bad(
        command="--batch_size",
        message="Missing value for argument '--batch_size'. Expected 1 values.",
    ),
    "an empty value": Bad(
        command="--batch_size ''",
        message="Error parsing --batch_size: '' must be a whole number, such as 32.",
    ),
    "not a number": Bad(
        command="--batch_size many",
        message="Error parsing --batch_size: 'many' must be a whole number, such as 32.",
    ),
    "not a whole number": Bad(
        command="--batch_size 2.5",
        message="Error parsing --batch_size: '2.5' must be a whole number, such as 32.",
    ),
    "not a float": Bad(
        command="--weight_decay much",
        message="Error parsing --weight_decay: 'much' must be a number, such as 0.1.",
    ),
    "out of range": Bad(
        command="--momentum 1.5",
        message=r"--momentum 1.5: must be at least 0 and less than 1\.",
    ),
    "negative": Bad(
        command="--batch_size -4",
        message="--batch_size -4: must be at least 1.",
    ),
    "an accuracy in percent": Bad(
        command="--test_data null --target_accuracy 90",
        message="--target_accuracy 90.0: must be from 0 to 1; give 0.9 for 90%.",
    ),
    "no evaluation to wait for": Bad(
        command="--patience 3",
        message="--patience 3: the run is never evaluated; add --test_data.",
    ),
    "nan": Bad(command="--max_loss nan", message="--max_loss nan: must be at least 0."),
    "infinite": Bad(
        command="--timeout inf",
        message="--timeout inf: must be greater than 0 and finite.",
    ),
    "not a choice": Bad(
        command="--dtype double",
        message=r"invalid choice 'double' for argument '--dtype'. Expected one of \('float', "
        r"'float16', 'bfloat16'\).",
    ),
    "parameters of 16 bits in a forward of 32": Bad(
        command="--update sharded --param_dtype bfloat16",
        message=r"--param_dtype bfloat16: needs a forward in bfloat16: .* add --dtype "
        r"bfloat16, or leave out --param_dtype\.",
    ),
    "contradictory": Bad(
        command="--num_gpus 2 --num_workers 2",
        message="--num_gpus 2 and --num_workers 2 are redundant: use one of them.",
    ),
    "two rendezvous": Bad(
        command="--redis_host h --master h:1",
        message="--redis_host and --master select different rendezvous methods: use one.",
    ),
    "a flag that needs another": Bad(
        command="--num_shards 2 --master node0:29500",
        message="--num_shards 2 needs --run_id, the same on all machines.",
    ),
    "a machine out of range": Bad(
        command="--num_shards 2 --shard_id 2 --master node0:29500 --run_id r",
        message="--shard_id 2: must be 0 to 1 with --num_shards 2.",
    ),
    "a port out of range": Bad(
        command="--redis_host h --redis_port 99999",
        message=r"--redis_port 99999: must be from 1 to 65535\.",
    ),
    "a run's name that is a path": Bad(
        command="--run_id ../r",
        message=r"--run_id '\.\./r': the value is used as a file name; use "
        r"printable characters except / and \\, and not only blanks and dots\.",
    ),
    "a run's name of too many bytes": Bad(
        command=f"--run_id {'é' * 101}",
        message=f"--run_id {'é' * 20}…: the value is used as a file name; use at most 200 bytes in "
        "UTF-8.",
    ),
    "steps to trace in the wrong order": Bad(
        command="--trace_steps 4:2",
        message="--trace_steps 4:2: give the first and the last step, counted from 0, such as "
        r"100:104\.",
    ),
    "a step of too many digits": Bad(
        command=f"--trace_steps 1:{'9' * 5000}",
        message=f"--trace_steps 1:{'9' * 18}: give the first and the last step, counted from 0, "
        r"such as 100:104\.",
    ),
    "shares by speed of one worker": Bad(
        command="--shares measured",
        message="--shares measured: there is only one worker, which trains the whole batch; start "
        "several workers, or leave out --shares.",
    ),
    "shares by speed where weights are averaged": Bad(
        command="--shares measured --sync average --num_workers 2",
        message="--shares measured can't be used with --sync average, whose workers wait for each "
        "other at merges only: leave out --shares, or use --sync notified or allreduce.",
    ),
    "shares that there aren't": Bad(
        command="--shares halves",
        message=r"invalid choice 'halves' for argument '--shares'. Expected one of \('auto', "
        r"'equal', 'measured'\).",
    ),
    "stages that don't divide the workers": Bad(
        command="--stages 2 --num_workers 3",
        message="--stages 2: each stage has a worker of its own, and 2 stages don't divide 3 "
        r"workers; start 4, with --num_workers or --num_gpus\.",
    ),
    "fewer microbatches than stages": Bad(
        command="--stages 2 --num_workers 2 --microbatches 1",
        message="--microbatches 1: must be at least the number of stages, 2: with fewer, a stage "
        r"is idle for 50% of a step \(the bubble\), or for longer; use 8 microbatches, .* 11%\.",
    ),
    "more stages than blocks": Bad(
        command="--stages 13 --num_workers 13 --epoch_size 13 --model resnet20",
        message="--stages 13: resnet20 has 12 blocks, and a stage has at least one; use fewer "
        r"stages\.",
    ),
    "a cut that there isn't": Bad(
        command="--stages 2 --num_workers 2 --model resnet50 --cuts layr3",
        message=r"--cuts names 'layr3', where no stage can begin: each stage but the first "
        r"begins at a block of the model, which are bn1, .*, fc\. Did you mean layer3 .*\?",
    ),
    "too many cuts": Bad(
        command="--stages 2 --num_workers 2 --cuts layer1,layer2",
        message="--cuts layer1,layer2: names 2 blocks, but 2 stages begin at 1 besides the first; "
        r"name a block for each stage but the first, or leave out --cuts\.",
    ),
    **{
        f"{flag} with stages": Bad(
            command=f"--stages 2 --num_workers 2 {flag}",
            message=f"{flag}: doesn't go with --stages 2: {reason}",
        )
        for flag, reason in {
            "--sync average": "each of its workers trains .*; use allreduce, notified or auto.",
            "--sync server": "each of its workers trains .*; use allreduce, notified or auto.",
            "--sync_bn": "BatchNorm's statistics are those of each microbatch; leave it out.",
            "--compile": "a stage runs blocks that aren't compiled; leave it out.",
            "--dtype float16": "loss scaling needs .*; use bfloat16 or float.",
        }.items()
    },
    "tensor ranks": Bad(
        command="--tensor 2 --num_workers 2",
        message="--tensor 2: the models of this command are image classifiers, .*; use --stages, "
        r"or call paceline.tensor_parallel\(model, world, plan\) in a script .*\.",
    ),
    "a tracker that there isn't": Bad(
        command="--tracker tensorboard,comet",
        message="--tracker tensorboard,comet: must be one or more of tensorboard, wandb, mlflow, "
        r"separated by commas\.",
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
    require_answer(Bad(command=NULL + bad.command, message=bad.message), tmp_path, capfd)


def test_a_mistyped_flag_names_the_nearest_one(tmp_path: Path) -> None:
    bad = Bad(command=NULL + "--batch_sise 3", message="Unrecognized options: --batch_sise, 3")
    ended = require_run_answer(bad, tmp_path)
    assert sections(ended.text)[1].startswith("Perhaps you meant: --batch_size INT")

"""The files for containers, Slurm and Kubernetes: what can be checked of them without a cluster."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from paceline.cli.flags import parse
from paceline.config.train import TrainConfig

ROOT = Path(__file__).parents[2]
DOCKERFILE = ROOT / "Dockerfile"
SBATCH = ROOT / "examples/slurm/train.sbatch"
KUBERNETES = ROOT / "examples/kubernetes/train.yaml"
BIN = Path(sys.executable).parent


def config_of(text: str) -> TrainConfig:
    """Read the flags of the `paceline train` in a text, as the command does."""
    command = re.sub(r"\\\n", "", text).partition("paceline train ")[2]
    return parse(TrainConfig, shlex.split(command), prog="paceline train", description="")


def resources() -> list[dict[str, object]]:
    return list(yaml.safe_load_all(KUBERNETES.read_text()))


@pytest.mark.parametrize(
    "command",
    [
        [str(BIN / "hadolint"), str(DOCKERFILE)],
        ["bash", "-n", str(SBATCH)],
        [str(BIN / "shellcheck"), str(SBATCH)],
    ],
    ids=["hadolint", "bash", "shellcheck"],
)
def test_a_linter_finds_nothing(command: list[str]) -> None:
    ended = subprocess.run(command, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout + ended.stderr) == (0, "")


def test_the_resources_follow_the_schemas_of_kubernetes() -> None:
    import kubernetes_validate

    for resource in resources():
        kubernetes_validate.validate(resource, kubernetes_validate.latest_version(), strict=True)


def test_a_file_says_in_its_head_that_it_was_checked_and_not_run() -> None:
    for path in (DOCKERFILE, SBATCH, KUBERNETES):
        head = path.read_text()[:200]
        assert re.search(r"Checked by .*, not (built or )?run\.", head), path


def test_the_image_gets_the_files_that_the_package_is_made_of() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    copies = re.findall(r"^COPY (.*) \S+$", DOCKERFILE.read_text(), re.MULTILINE)
    copied = {name for words in copies for name in words.split()}
    needed = {"pyproject.toml", "constraints.txt", "paceline", project["readme"]}
    assert copied == needed | set(project["license-files"])
    assert all((ROOT / name).exists() for name in copied)


def test_no_index_of_packages_is_in_the_image() -> None:
    assert "://" not in DOCKERFILE.read_text()


def test_the_commands_of_slurm_and_kubernetes_have_flags_that_exist() -> None:
    (job,) = (each for each in resources() if each["kind"] == "Job")
    (script,) = re.findall(r"exec paceline train .*", yaml.safe_dump(job, width=10_000))
    pod = config_of(script.replace("$JOB_COMPLETION_INDEX", "1"))
    assert isinstance(job["spec"], dict)
    assert pod.world.num_shards == job["spec"]["completions"] == job["spec"]["parallelism"]
    assert (pod.world.shard_id, str(pod.output.output_dir)) == (1, "/data/runs-1")
    task = config_of(SBATCH.read_text())
    assert task.data == pod.data
    assert task.optim == pod.optim

"""A net whose process publishes the port and the secret of its control line, for attacks on it.

line.<pid>    the port and the secret, in hexadecimal digits
"""

from __future__ import annotations

import gc
import os
from pathlib import Path

import torch
from torch import Tensor, nn

from paceline.atomic_write import write_atomically
from paceline.cluster.membership.control_line.line import ControlLine
from tests.harness.processes.fault_runs import ObservedNet


class OpenLineNet(ObservedNet):
    """Net of a fault run, which publishes the control line in its first forward."""

    def forward(self, images: Tensor) -> Tensor:
        path = line_file(Path(), os.getpid())
        if not path.exists():
            (line,) = (one for one in gc.get_objects() if type(one) is ControlLine)
            write_atomically(path, f"{line.port} {line._me.secret.hex()}")
        return super().forward(images)


def open_line(num_labels: int) -> nn.Module:
    """Make the net, for `--model`."""
    return OpenLineNet(num_labels, torch.float64)


def line_file(folder: Path, pid: int) -> Path:
    """Return the file of a process."""
    return folder / f"line.{pid}"


def read_line(folder: Path, pid: int) -> tuple[int, bytes]:
    """Return the port and the secret of a process's control line."""
    port, secret = line_file(folder, pid).read_text().split()
    return int(port), bytes.fromhex(secret)

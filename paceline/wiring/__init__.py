"""Makes a run's parts of its configuration: the only place that maps values to classes.

Each table of classes is one literal: `SOURCES` in `sources`, `SYNCHRONIZERS` in `exchange`.
"""

from paceline.wiring.checks import check
from paceline.wiring.exchange import Peers, connect, connect_layers, device_of, replicate
from paceline.wiring.machine_group import connect_machine
from paceline.wiring.model import import_optimizers, make_model, make_optimizer
from paceline.wiring.recorders import build_recorder, build_trace
from paceline.wiring.resume import Start, find_start
from paceline.wiring.sources import Databases, cores_per_worker, make_loader, open_sources
from paceline.wiring.trainer import build_trainer

__all__ = [
    "Databases",
    "Peers",
    "Start",
    "build_recorder",
    "build_trace",
    "build_trainer",
    "check",
    "connect",
    "connect_layers",
    "connect_machine",
    "cores_per_worker",
    "device_of",
    "find_start",
    "import_optimizers",
    "make_loader",
    "make_model",
    "make_optimizer",
    "open_sources",
    "replicate",
]

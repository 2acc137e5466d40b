"""Makes the components of a run from its configuration; the table of `--sync` is in `exchange`.

Other tables are beside their classes: codecs, stores, launchers, image formats, databases.
"""

from paceline.wiring.checks import check
from paceline.wiring.connections import device_of, open_run, refuse_shared_gpu
from paceline.wiring.decoding import Decoding
from paceline.wiring.exchange import replicate
from paceline.wiring.model import import_optimizers, make_model, make_optimizer
from paceline.wiring.recorders import (
    build_leader_recorder,
    build_recorder,
    build_trace,
    build_trackers,
    report_recovery,
)
from paceline.wiring.resume import Start, find_start
from paceline.wiring.sources import (
    Databases,
    cores_per_worker,
    open_sources,
    write_class_names,
)
from paceline.wiring.trainer import build_trainer

__all__ = [
    "Databases",
    "Decoding",
    "Start",
    "build_leader_recorder",
    "build_recorder",
    "build_trace",
    "build_trackers",
    "build_trainer",
    "check",
    "cores_per_worker",
    "device_of",
    "find_start",
    "import_optimizers",
    "make_model",
    "make_optimizer",
    "open_run",
    "open_sources",
    "refuse_shared_gpu",
    "replicate",
    "report_recovery",
    "write_class_names",
]

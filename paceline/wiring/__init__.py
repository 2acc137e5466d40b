"""Makes the components of a run from its configuration; the table of `--sync` is in `exchange`.

Other tables are beside their classes: codecs, stores, launchers, image formats, databases.
"""

from paceline.wiring.connections import device_of, refuse_shared_gpu
from paceline.wiring.exchange import replicate
from paceline.wiring.model import import_optimizers, make_model, make_optimizer
from paceline.wiring.sources import (
    Databases,
    cores_per_worker,
    open_sources,
    write_class_names,
)

__all__ = [
    "Databases",
    "cores_per_worker",
    "device_of",
    "import_optimizers",
    "make_model",
    "make_optimizer",
    "open_sources",
    "refuse_shared_gpu",
    "replicate",
    "write_class_names",
]

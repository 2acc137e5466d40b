"""What all tests share."""

from __future__ import annotations

import signal

import torch

torch.set_num_threads(1)  # several ranks, as threads or processes, share the machine's few cores

# Whoever runs the tests in the background (nohup, a script's &) has these ignored, and so would the
# processes have that tests send them to.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

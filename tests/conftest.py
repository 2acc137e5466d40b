"""What all tests share."""

from __future__ import annotations

import torch

torch.set_num_threads(1)  # several ranks, as threads or processes, share the machine's few cores

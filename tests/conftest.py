"""For every test: one torch thread, since the tests share two cores with the peers that they
start, and no limit on an example's time, which says more about the machine than about the code."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from hypothesis import settings

torch.set_num_threads(1)
settings.register_profile("swarmnet", deadline=None, print_blob=True)
settings.load_profile("swarmnet")

"""For every test: one torch thread, since the tests share two cores with the peers that they
start."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

torch.set_num_threads(1)

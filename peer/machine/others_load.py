"""How much of the machine others than this peer use: its CPU, and its GPUs where NVIDIA's library
is there (`pip install nvidia-ml-py`)."""

from __future__ import annotations

import logging
import time
from typing import Any

import psutil

from peer.machine.memory_cap import tree_cpu_s
from swarmnet.system import has_nvidia_driver

log = logging.getLogger("swarmnet.peer")


def load_of_others(busy_s: float, own_s: float, elapsed_s: float, num_cores: int) -> float:
    """Part of the CPU, 0 to 1, from CPU seconds of the whole machine and of the own process tree in
    the same time."""
    if elapsed_s <= 0:
        return 0.0
    return min(1.0, max(0.0, (busy_s - own_s) / (elapsed_s * num_cores)))


class OthersLoad:
    """Measures between one look and the next."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._num_cores = psutil.cpu_count() or 1
        self._gpus = _Gpus()
        self._before = self._look()

    def measure(self) -> float:
        """The larger of the parts of the CPU and of the busiest GPU, since the last look; blocks
        for some milliseconds."""
        before, self._before = self._before, self._look()
        now_s, busy_s, own = self._before
        own_s = sum(
            seconds - before[2].get(pid, 0.0) for pid, seconds in own.items() if pid in before[2]
        )
        elapsed_s = now_s - before[0]
        cpu = load_of_others(busy_s - before[1], own_s, elapsed_s, self._num_cores)
        return max(cpu, self._gpus.measure(own.keys()))

    def _look(self) -> tuple[float, float, dict[int, float]]:
        times = psutil.cpu_times()
        idle_s = times.idle + getattr(times, "iowait", 0.0)
        # Guests are in `user` already.
        guests_s = getattr(times, "guest", 0.0) + getattr(times, "guest_nice", 0.0)
        return time.monotonic(), sum(times) - idle_s - guests_s, tree_cpu_s(self._process)


class _Gpus:
    """Utilisation of the GPUs by other processes; of none where the library is not there."""

    def __init__(self) -> None:
        self._nvml: Any = None
        self._handles: list[Any] = []
        self._seen_us = time.time_ns() // 1000
        try:
            import pynvml

            pynvml.nvmlInit()
            count = pynvml.nvmlDeviceGetCount()
            self._handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(count)]
            self._nvml = pynvml
        except ImportError:
            if psutil.LINUX and has_nvidia_driver():
                log.warning(
                    "--pause-when-busy watches the CPU only; to watch the GPU too: "
                    "pip install nvidia-ml-py"
                )
        except Exception as e:
            log.info("the GPUs are not watched: %s", e)

    def measure(self, own_pids: Any) -> float:
        """Part of the busiest GPU's time, 0 to 1, that others used since the last look."""
        busiest = 0.0
        since_us, self._seen_us = self._seen_us, time.time_ns() // 1000
        for handle in self._handles:
            try:
                samples = self._nvml.nvmlDeviceGetProcessUtilization(handle, since_us)
            except self._nvml.NVMLError:  # also: no sample since
                continue
            by_pid: dict[int, list[int]] = {}
            for sample in samples:
                if sample.pid not in own_pids:
                    by_pid.setdefault(sample.pid, []).append(sample.smUtil)
            used = sum(sum(values) / len(values) for values in by_pid.values())
            busiest = max(busiest, used / 100)
        return min(1.0, busiest)

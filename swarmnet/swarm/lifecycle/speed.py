"""How fast this machine is, or is likely to be, in a stage: what it announces to others."""

from __future__ import annotations

from statistics import fmean

from swarmnet.swarm.machine import Machine
from swarmnet.swarm.replica.replica import Replica
from swarmnet.transport.base import Transport


class Speed:
    """The expected and the measured rate of this machine, beside what its other seats serve."""

    def __init__(self, machine: Machine, transport: Transport, samples_per_microbatch: int) -> None:
        self._machine = machine
        self._transport = transport
        self._samples = samples_per_microbatch
        self._expected_s = 0.0
        """Device seconds of a microbatch in a stage of middle cost; 0: unknown."""
        self._busy_s = 0.0

    async def measure(self) -> None:
        """Measures the device, where nothing is known of it yet."""
        if not self._expected_s:
            self._expected_s = await self._machine.worker.run(self._machine.measure)

    def expected_rate(self, stage_index: int) -> float:
        """Samples/s of a stage beside those that the machine serves; 0 while unknown."""
        if not self._expected_s:
            return 0.0
        own_s = self._expected_s * self._relative_cost(stage_index)
        return self._samples / (own_s + sum(self._machine.services.values()))

    def rate(self, replica: Replica) -> float:
        """Samples/s that the device could do of a stage, or the uplink carry: as measured, else as
        expected; 0 while unknown."""
        services = self._machine.services
        expected_s = self._expected_s * self._relative_cost(replica.index)
        services[replica.index] = replica.service_s or expected_s
        if not services[replica.index]:
            return 0.0
        link_s = self._transport.traffic.upload_s(replica.measured.sent_bytes)
        return self._samples / max(sum(services.values()), link_s)

    def busy_since_opening(self, replica: Replica) -> float:
        """Seconds that the device has worked since the round before was opened."""
        before, self._busy_s = self._busy_s, replica.device.busy_s
        return max(0.0, self._busy_s - before) if replica.measured.open_s else 0.0

    def learn(self, replica: Replica) -> None:
        """Expects of the next stage what was measured in this one."""
        if replica.service_s:
            self._expected_s = replica.service_s / self._relative_cost(replica.index)

    def stopped(self, stage_index: int) -> None:
        """The device serves a stage no more."""
        self._machine.services.pop(stage_index, None)

    def _relative_cost(self, stage_index: int) -> float:
        """Of a stage, over that of a middle one."""
        costs = self._machine.stage_costs
        return costs[stage_index] / fmean(costs) if costs else 1.0

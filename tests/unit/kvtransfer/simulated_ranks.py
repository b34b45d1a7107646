"""Hosts of the simulation lose a rank: first it is heard no more, later it is known to be dead.

In between it may do anything that it was told before, and hears nothing: it reads, writes and lets bytes in.
"""

from tests.unit.kvtransfer.simulated_host import Host
from tests.unit.kvtransfer.simulated_network import SimulatedNetwork


class SimulatedRanks(SimulatedNetwork):
    def step_lose_rank(self) -> None:
        host = (self.source, self.destination)[self.pick(2)]
        others = sorted({rank for rank in host.ranks if rank})
        if not others or host.lost_rank is not None:
            return
        host.lost_rank = others[self.pick(len(others))]
        host.verifications = [each for each in host.verifications if not host.is_lost(each[1])]
        for handoff in host.handoffs():
            self._do(host, handoff.transfer, handoff.fail(f"rank {host.lost_rank} is lost"))

    def step_bury_rank(self) -> None:
        self._on_peer_death((self.source, self.destination)[self.pick(2)])

    def on_peer_death(self) -> None:
        """Every rank that is lost is known to be dead at last."""
        for host in (self.source, self.destination):
            self._on_peer_death(host)

    def _on_peer_death(self, host: Host) -> None:
        if host.lost_rank is None or host.is_rank_dead:
            return
        host.is_rank_dead = True
        shards = [shard for shard in range(self.num_shards) if host.is_lost(shard)]
        self.jobs = [job for job in self.jobs if job.source is not host or job.shard not in shards]
        self._end_registrations(host, shards)
        self._tell_peer(host, shards)
        self._end_stops()

    def _end_registrations(self, host: Host, shards: list[int]) -> None:
        """Its memory is gone, and whoever wrote there writes nowhere."""
        ended = [each for each in self.flights if each.job.destination is host and each.job.shard in shards]
        for flight in ended:
            self.flights.remove(flight)
            flight.job.has_failed = True
        for job in self.jobs:
            job.has_failed |= job.destination is host and job.shard in shards and not job.is_direct
        for transfer in list(host.destinations):
            for shard in shards:
                self._writer_stopped(host, transfer, shard)

    def _tell_peer(self, host: Host, shards: list[int]) -> None:
        """Where it wrote into a peer's memory, the peer knows of its death by itself."""
        peer = self._peer(host)
        for transfer, handoff in list(peer.destinations.items()):
            if self.peers[peer, transfer] is host and self.is_direct[transfer] and self.pick(2):
                self._do(peer, transfer, handoff.fail("the source's process died"))
                for shard in shards:
                    self._writer_stopped(peer, transfer, shard)

"""Ray Serve's choice of a replica: the one that was given the request's prefix before.

The rule is `jaxinfer.prefix_router`'s. Each process that routes remembers for itself, so a few
fronts route better than many.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from jaxinfer.prefix_router import PrefixRouter

# Pieces of text remembered of each replica: 1.3 million characters of prompts.
CAPACITY = 20_000


class PrefixAwareRouter(RequestRouter):
    """Sends a request where its prefix is, within limits of load."""

    def initialize_state(self, capacity: int = CAPACITY, **_: Any) -> None:
        """Called by Ray Serve, with the settings of the deployment."""
        self._router: PrefixRouter[ReplicaID] = PrefixRouter(capacity)
        self._loads: Counter[ReplicaID] = Counter()

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Return the best replica, then all others, in case that it takes no more."""
        if not candidate_replicas:
            return []
        hashes: Sequence[bytes] = ()
        if pending_request is not None:
            hashes = pending_request.kwargs.get("hashes", ())
        by_id = {replica.replica_id: replica for replica in candidate_replicas}
        chosen = self._router.place(hashes, {i: float(self._loads[i]) for i in by_id})
        others = sorted((i for i in by_id if i != chosen), key=lambda i: self._loads[i])
        return [[by_id[chosen]], [by_id[i] for i in others]]

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any
    ) -> None:
        """Count a request as under way."""
        self._loads[replica_id] += 1

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Count a request as over, however it ended."""
        self._loads[replica_id] -= 1
        if self._loads[replica_id] <= 0:
            del self._loads[replica_id]

"""Settings of the Ray Serve application. Imports no Ray, so that a file of them can be checked."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class ClusterSettings(BaseModel):
    """The arguments of the application, as `serve run` and Serve's configuration file have them.

    Attributes:
        model: As for `jaxinfer serve`.
        engine: Further fields of `EngineConfig`.
        server: Fields of `ServerOptions` that say how requests are answered.
        min_replicas: Replicas that there always are.
        max_replicas: Replicas that there may be.
        target_ongoing_requests: Requests, queued or running, for which a replica is there: more
            make Serve start another one.
        max_ongoing_requests: Requests that one replica is given at once.
        max_queued_requests: Requests that may wait for a replica; then 503. -1 for no limit.
        num_gpus: Of each replica.
        num_cpus: Of each replica.
        num_fronts: Processes that take requests from the proxies. Each routes by what it has seen.
        drain_timeout_s: How long a replica that has to go may finish what it runs.
        upscale_delay_s: How long there have to be too many requests.
        downscale_delay_s: How long there have to be too few.
        router: "prefix" sends a request where its prefix is, "round-robin" to each in turn,
            "least-busy" to the less busy of two.
    """

    model_config = ConfigDict(extra="forbid")

    model: str | None = None
    engine: dict[str, Any] = Field(default_factory=dict)
    server: dict[str, Any] = Field(default_factory=dict)
    min_replicas: int = Field(1, ge=0)
    max_replicas: int = Field(1, ge=1)
    target_ongoing_requests: float = Field(16, gt=0)
    max_ongoing_requests: int = Field(64, ge=1)
    max_queued_requests: int = -1
    num_gpus: float = Field(0, ge=0)
    num_cpus: float = Field(1, ge=0)
    num_fronts: int = Field(1, ge=1)
    drain_timeout_s: float = Field(300, ge=0)
    upscale_delay_s: float = Field(10, ge=0)
    downscale_delay_s: float = Field(600, ge=0)
    router: Literal["prefix", "round-robin", "least-busy"] = "prefix"

"""The Ray Serve application: `serve run jaxinfer.cluster.application:build model=PATH`."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from ray import serve
from ray.serve.config import AutoscalingConfig, RequestRouterConfig

from jaxinfer.cluster.front import Front
from jaxinfer.cluster.replica import EngineReplica, Load
from jaxinfer.cluster.router import PrefixAwareRouter

_ROUTERS: dict[str, Any] = {
    "prefix": PrefixAwareRouter,
    "round-robin": "ray.serve.experimental.round_robin_router:RoundRobinRouter",
    "least-busy": "ray.serve._private.request_router:PowerOfTwoChoicesRequestRouter",
}


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


def build(args: ClusterSettings, load: Load | None = None) -> serve.Application:
    """Return the application; Ray Serve calls this with the arguments it was given.

    A new version of it is rolled out replica by replica: each one drains while its successor loads.

    Args:
        args: The settings.
        load: Loads the model on a replica; None for `jaxinfer.loading`.
    """
    router = RequestRouterConfig(request_router_class=_ROUTERS[args.router])
    replicas = serve.deployment(
        EngineReplica,
        name="engine",
        autoscaling_config=AutoscalingConfig(
            min_replicas=args.min_replicas,
            max_replicas=args.max_replicas,
            target_ongoing_requests=args.target_ongoing_requests,
            upscale_delay_s=args.upscale_delay_s,
            downscale_delay_s=args.downscale_delay_s,
        ),
        max_ongoing_requests=args.max_ongoing_requests,
        max_queued_requests=args.max_queued_requests,
        ray_actor_options={"num_cpus": args.num_cpus, "num_gpus": args.num_gpus},
        graceful_shutdown_timeout_s=args.drain_timeout_s,
        health_check_period_s=5,
        health_check_timeout_s=30,
        request_router_config=router,
    )
    front = serve.deployment(
        Front,
        name="front",
        num_replicas=args.num_fronts,
        # It only waits: the limits that matter are the engines'.
        max_ongoing_requests=100_000,
        ray_actor_options={"num_cpus": 0},
    )
    settings = {"model": args.model, **args.engine}
    return front.bind(replicas.bind(settings, args.server, load))

"""The Ray Serve application: `serve run jaxinfer.cluster.application:build model=PATH`."""

from __future__ import annotations

from typing import Any

from ray import serve
from ray.serve.config import AutoscalingConfig, RequestRouterConfig

from jaxinfer.cluster.front import Front
from jaxinfer.cluster.replica import EngineReplica, Load
from jaxinfer.cluster.router import PrefixAwareRouter
from jaxinfer.cluster.settings import ClusterSettings

_ROUTERS: dict[str, Any] = {
    "prefix": PrefixAwareRouter,
    "round-robin": "ray.serve.experimental.round_robin_router:RoundRobinRouter",
    "least-busy": "ray.serve._private.request_router:PowerOfTwoChoicesRequestRouter",
}


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

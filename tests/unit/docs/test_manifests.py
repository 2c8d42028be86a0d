"""The Kubernetes manifests of the docs: flags, paths, grace periods and GPUs that exist and fit."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from jaxinfer.cli import app
from jaxinfer.cluster.settings import ClusterSettings
from jaxinfer.config import EngineConfig
from jaxinfer.server import run
from jaxinfer.server.endpoints import ENDPOINTS
from jaxinfer.server.options import ServerOptions

FOLDER = Path(__file__).parents[3] / "docs" / "kubernetes"
# What LeaderWorkerSet sets in every pod.
ENVIRONMENT = {"LWS_GROUP_SIZE": "2", "LWS_WORKER_INDEX": "0", "LWS_LEADER_ADDRESS": "leader"}


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((FOLDER / name).read_text()))


def pods(node: Any) -> Iterator[dict[str, Any]]:
    """Yield all pod specs below a node."""
    if isinstance(node, dict):
        if "containers" in node:
            yield node
        for value in node.values():
            yield from pods(value)
    elif isinstance(node, list):
        for value in node:
            yield from pods(value)


def command(container: dict[str, Any]) -> list[str]:
    """Return the arguments of `jaxinfer`."""
    if "command" not in container:
        return container["args"]
    [line] = container["args"]
    for name, value in ENVIRONMENT.items():
        line = line.replace(f"${name}", value)
    words = shlex.split(line)
    assert words[:2] == ["exec", "jaxinfer"] and "$" not in line
    return words[2:]


def parsed(monkeypatch: pytest.MonkeyPatch, args: list[str]) -> tuple[EngineConfig, ServerOptions]:
    calls: list[tuple[EngineConfig, ServerOptions]] = []
    monkeypatch.setattr(run, "serve", lambda config, options: calls.append((config, options)))
    result = CliRunner().invoke(app, args)
    assert result.exit_code == 0, result.output
    return calls[0]


@pytest.mark.parametrize("name", ["server.yaml", "hosts.yaml"])
def test_servers_have_flags_probes_time_and_devices_that_fit(name, monkeypatch):
    paths = {endpoint.path for endpoint in ENDPOINTS}
    found = list(pods(documents(name)))
    for pod in found:
        [container] = pod["containers"]
        config, options = parsed(monkeypatch, command(container))
        assert pod["terminationGracePeriodSeconds"] > options.drain_timeout_s
        gpus = container["resources"]["limits"]["nvidia.com/gpu"]
        assert gpus * config.num_hosts == config.data_parallel_size * config.tensor_parallel_size
        mounted = {mount["name"] for mount in container["volumeMounts"]}
        assert mounted == {volume["name"] for volume in pod["volumes"]}
        ports = {port["name"]: port["containerPort"] for port in container.get("ports", ())}
        if not ports:
            continue  # a host that follows has no port
        assert options.host == "0.0.0.0" and ports["http"] == options.port
        for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
            probe = container[kind]["httpGet"]
            assert probe["path"] in paths and probe["port"] in ports
        # Probes that fail while it drains must not cut what still runs.
        liveness = container["livenessProbe"]
        assert liveness["periodSeconds"] * liveness["failureThreshold"] > options.drain_timeout_s
    assert len(found) == {"server.yaml": 1, "hosts.yaml": 2}[name]


@pytest.mark.parametrize("name", ["server.yaml", "hosts.yaml"])
def test_services_select_the_pods_that_have_a_port(name):
    *_, workload = (d for d in documents(name) if d["kind"] in ("Deployment", "LeaderWorkerSet"))
    [service] = (d for d in documents(name) if d["kind"] == "Service")
    spec = workload["spec"]
    template = spec.get("template") or spec["leaderWorkerTemplate"]["leaderTemplate"]
    assert service["spec"]["selector"].items() <= template["metadata"]["labels"].items()


def test_hosts_of_a_model_are_given_the_same_settings(monkeypatch):
    configs = [
        parsed(monkeypatch, command(pod["containers"][0]))[0]
        for pod in pods(documents("hosts.yaml"))
    ]
    assert configs[0] == configs[1] and configs[0].num_hosts == 2


def test_the_ray_service_has_settings_that_exist_and_gpus_for_its_replicas():
    [service] = documents("ray.yaml")
    [application] = yaml.safe_load(service["spec"]["serveConfigV2"])["applications"]
    settings = ClusterSettings(**application["args"])
    EngineConfig(model=settings.model, **settings.engine)
    module, _, function = application["import_path"].partition(":")
    path = FOLDER.parents[1].joinpath(*module.split(".")).with_suffix(".py")
    assert f"def {function}(" in path.read_text()
    [group] = service["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    [worker] = list(pods(group))
    limits = worker["containers"][0]["resources"]["limits"]
    assert group["maxReplicas"] * limits["nvidia.com/gpu"] >= (
        settings.max_replicas * settings.num_gpus
    )
    assert float(limits["cpu"]) >= settings.num_cpus
    assert worker["terminationGracePeriodSeconds"] > settings.drain_timeout_s

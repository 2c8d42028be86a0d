"""How the processes of one model find each other, and agree before anything is computed.

They meet in the key-value store of `jax.distributed`, before any device is touched: what waits for
all devices inside XLA can be neither interrupted nor told that somebody is missing.
"""

from __future__ import annotations

import json
import logging
import secrets
import socket
from dataclasses import asdict, replace
from typing import Any

import jax

from jaxinfer.config import EngineConfig
from jaxinfer.errors import ConfigError
from jaxinfer.hosts.channel import (
    CONNECT_TIMEOUT_S,
    LOADING_FACTOR,
    SECRET_BYTES,
    Follower,
    Leader,
)

logger = logging.getLogger(__name__)

OWN_SETTINGS = ("model", "tokenizer", "host_rank", "compilation_cache_dir")
"""What a host may have otherwise than host 0: places on its disk, and its number."""

_KEY = "jaxinfer/leader"


def join(config: EngineConfig) -> tuple[Leader | Follower, EngineConfig]:
    """Meet the other processes; return this one's side of the channel, and the common settings.

    Has to come before anything touches a device. Waits for all of them.

    Raises:
        ConfigError: The settings do not go together, or with the devices of all hosts.
        HostLostError: Somebody ended meanwhile.
    """
    check_hosts(config)
    # A process that is lost must not take this one with it: there are requests to be answered.
    jax.config.update("jax_enable_recoverability", True)
    # It would take SIGTERM away from the server, which drains on it.
    jax.config.update("jax_enable_preemption_service", False)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    address = config.coordinator_address
    assert address, "checked by `check_hosts`"
    logger.info(
        "host %d of %d: waiting for the others at %s", config.host_rank, config.num_hosts, address
    )
    jax.distributed.initialize(address, config.num_hosts, config.host_rank)
    host = address.rpartition(":")[0].strip("[]")
    if config.host_rank:
        channel = _follow(config, host)
        channel.listen()
        settings = json.loads(channel.welcome)
        config = settings_of(settings, config)
        _check_devices(config)
        return channel, config
    leader = _lead(config, host)
    try:
        leader.watched(lambda: _check_devices(config))
    except BaseException:
        leader.close()
        raise
    return leader, config


def settings_of(settings: dict[str, Any], own: EngineConfig) -> EngineConfig:
    """Return host 0's settings, but for what is this host's own."""
    return EngineConfig(**{**settings, **{name: getattr(own, name) for name in OWN_SETTINGS}})


def check_hosts(config: EngineConfig) -> None:
    """Refuse settings of hosts that do not go together.

    Raises:
        ConfigError: Says which.
    """
    if config.host_rank >= config.num_hosts:
        raise ConfigError(
            f"host_rank must lie in [0, num_hosts), got {config.host_rank} of {config.num_hosts}"
        )
    address = config.coordinator_address
    if config.num_hosts == 1:
        if address is not None:
            raise ConfigError(f"coordinator_address={address!r} needs num_hosts, which is 1")
        return
    host, _, port = (address or "").rpartition(":")
    if not host or not port.isascii() or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise ConfigError(
            f"num_hosts={config.num_hosts} needs coordinator_address, HOST:PORT of host 0, got "
            f"{address!r}"
        )
    if config.data_parallel_size > 1:
        raise ConfigError(
            f"data_parallel_size={config.data_parallel_size} on num_hosts={config.num_hosts} is "
            "not supported: start one such group for each replica, and a router in front"
        )
    if config.logits_processors:
        raise ConfigError("logits_processors need an engine on one host; leave them out")


def _lead(config: EngineConfig, host: str) -> Leader:
    secret = secrets.token_bytes(SECRET_BYTES)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as listener:
        port = listener.getsockname()[1]
        try:
            _store().key_value_set(_KEY, f"{port} {secret.hex()}")
        except jax.errors.JaxRuntimeError as error:
            raise ConfigError(
                f"another host 0 is at {config.coordinator_address}; give each host a rank of its "
                "own"
            ) from error
        return Leader(
            listener,
            secret,
            config.num_hosts - 1,
            config.host_timeout_s,
            # A program that is compiled on first use keeps everybody waiting.
            call_timeout_s=config.host_timeout_s * (1 if config.warmup else LOADING_FACTOR),
            welcome=json.dumps(asdict(replace(config, logits_processors=()))),
        )


def _follow(config: EngineConfig, host: str) -> Follower:
    port, secret = _store().blocking_key_value_get(_KEY, int(1000 * CONNECT_TIMEOUT_S)).split()
    channel = Follower(
        host, int(port), bytes.fromhex(secret), config.host_rank, config.host_timeout_s
    )
    channel.timeout_s = json.loads(channel.welcome)["host_timeout_s"]
    return channel


def _check_devices(config: EngineConfig) -> None:
    """Wait until all devices know each other; fail unless all of them share each layer."""
    if jax.device_count() != config.tensor_parallel_size:
        raise ConfigError(
            f"tensor_parallel_size={config.tensor_parallel_size} must be the number of all "
            f"devices, {jax.device_count()} on {config.num_hosts} hosts: each host holds a part "
            "of the model"
        )


def _store() -> Any:
    # Private, for the public way to tell all processes something is a program on all their devices.
    from jax._src import distributed  # noqa: TID251

    return distributed.global_state.client

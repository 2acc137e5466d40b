"""Configuration of `paceline serve`."""

from __future__ import annotations

import re
from dataclasses import dataclass

from paceline.config.rules import positive
from paceline.config.world import WorldConfig
from paceline.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """Options of `paceline serve`."""

    run_id: str = ""
    """Name of the run to serve, as its machines have it."""

    file_store_path: str = ""
    """Rendezvous through this folder, as the run's."""

    redis_host: str = ""
    """Rendezvous through this Redis server, as the run's."""

    redis_port: int = 6379
    """Port of the Redis server."""

    redis_url: str = ""
    """URL of the Redis server for rendezvous, with password and TLS: rediss://:PASSWORD@HOST:PORT/0."""

    etcd: str = ""
    """Rendezvous through this etcd cluster, as the run's: HOST:PORT, or several with commas
    between."""

    master: str = ""
    """Rendezvous at the run's machine 0, HOST:PORT."""

    secret_file: str = ""
    """File with the run's secret. The environment variable PACELINE_SECRET is an alternative."""

    model: str = ""
    """Serve only a model with this digest of names and shapes, which the server prints. By default,
    any model is served."""

    first_iter_timeout: float = 1200.0
    """Timeout in seconds until the run has come and all its workers have connected."""

    distributed_interfaces: str = ""
    """Network interfaces to use, comma-separated (default: those that reach the workers)."""

    def __post_init__(self) -> None:
        positive("first_iter_timeout", self.first_iter_timeout)
        if self.model and not re.fullmatch("[0-9a-f]{8}", self.model):
            raise ConfigError(
                flag="model",
                value=self.model,
                rule="must be a model's digest, eight hexadecimal digits",
                remedy="copy it from the line that a server prints, or leave it out to serve any",
            )
        self.world  # noqa: B018 - raises where the rendezvous is wrong

    def require_run(self) -> None:
        """Require a run and a rendezvous.

        Raises:
            ConfigError: one is missing.
        """
        if not self.run_id:
            raise ConfigError(
                "paceline serve needs --run_id, the name of the run whose workers it serves."
            )
        if not self._rendezvous:
            raise ConfigError(
                "paceline serve needs the run's rendezvous: use --file_store_path, --redis_host, "
                "--redis_url, --etcd or --master, as the run does."
            )

    @property
    def _rendezvous(self) -> str:
        return self.file_store_path or self.redis_host or self.redis_url or self.etcd or self.master

    @property
    def world(self) -> WorldConfig:
        """The rendezvous, as the run's machines have it."""
        return WorldConfig(
            run_id=self.run_id,
            file_store_path=self.file_store_path,
            redis_host=self.redis_host,
            redis_port=self.redis_port,
            redis_url=self.redis_url,
            etcd=self.etcd,
            master=self.master,
            secret_file=self.secret_file,
            first_iter_timeout=self.first_iter_timeout,
            distributed_interfaces=self.distributed_interfaces,
        )

"""The same server on the nodes of a Ray cluster: Ray Serve starts replicas of it, and spreads requests over them."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from headrace.engine.ray.connection import connect
from headrace.errors import UnfitMachine
from headrace.serving.application import PredictionServer
from headrace.serving.running import Listening
from headrace.serving.settings import ServeSettings

_APPLICATION = "headrace"


def run_on_ray(
    folders: Sequence[Path],
    settings: ServeSettings,
    cluster: str,
    address: tuple[str, int],
    replicas: int,
    listening: Callable[[Listening], None],
) -> None:
    """Answers requests on a Ray cluster until a signal; then the replicas answer what has come, and end.

    Args:
        folders: of models, at the same paths on every node.
        cluster: "ray://auto", or the address of one.
        address: host and port, on every node.

    Raises:
        UnfitMachine: Ray Serve is not installed, or there is no cluster.
        DataError: a folder is not what was exported.
    """
    # So that what is wrong with a folder is said here, not in the log of a replica.
    checked = PredictionServer(folders, settings)
    models = {name: tuple(model.due(settings.keep)) for name, model in checked.catalog.models.items()}
    host, port = address
    with ExitStack() as connection:
        connect(cluster, None, connection)
        try:
            from ray import serve
        except ImportError as error:
            raise UnfitMachine(f"Ray Serve is not installed here ({error}): pip install 'ray[serve]'") from error
        serve.start(http_options={"host": host, "port": port}, logging_config={"log_level": "WARNING"})
        connection.callback(serve.shutdown)
        serve.run(_deployment(serve, folders, settings, replicas), name=_APPLICATION, route_prefix="/")
        ended = threading.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: ended.set())
        listening(Listening(f"http://{host}:{port}", models))
        ended.wait()
        serve.delete(_APPLICATION)


def _deployment(serve: Any, folders: Sequence[Path], settings: ServeSettings, replicas: int) -> Any:
    """Returns the application; each replica makes a server of its own."""
    paths = [folder.resolve() for folder in folders]

    @serve.deployment(
        num_replicas=replicas,
        max_ongoing_requests=2 * settings.max_queue,
        ray_actor_options={"num_cpus": settings.threads or 1},
    )
    @serve.ingress(lambda: PredictionServer(paths, settings))
    class Predictions:
        pass

    deployment: Any = Predictions
    return deployment.bind()

"""`headrace serve`: a server for exported models."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from headrace.cli.combinations import refuse_idle
from headrace.cli.command import argument, command, option
from headrace.cli.options import MOST_SECONDS
from headrace.cli.output import Answer
from headrace.errors import UsageError
from headrace.web.access import check_access, is_loopback, read_token

if TYPE_CHECKING:
    from headrace.serving.running import Listening

_EXAMPLES = """
  headrace serve model
  headrace serve models/a models/b --port 9000 --max-batch 64 --max-wait-ms 5
  headrace serve model --host 0.0.0.0 --token-file token
  headrace serve model --cluster ray://auto --replicas 4
"""
_RAY = "ray://"
_TOKEN = "HEADRACE_SERVE_TOKEN"

_Models = Annotated[
    list[Path],
    argument(
        "MODEL", "Folders that `export` has written, or folders of such ones named 1, 2, ...: versions of one model."
    ),
]
_HealthPort = Annotated[
    int | None,
    option(
        "--health-port",
        "Also answer probes here, in a thread of their own: no load delays them. 0 for a free one.",
        min=0,
        max=65535,
    ),
]
_MaxWait = Annotated[float, option("--max-wait-ms MS", "How long a request waits for others.", min=0, max=10_000)]
_TokenFile = Annotated[
    Path | None,
    option("--token-file FILE", f"Requests must name the token in this file of mode 600; or that in {_TOKEN}."),
]
_TrustPt2 = Annotated[bool, option("--trust-pt2", "Also load model.pt2, which may hold code: for folders of your own.")]
_Drain = Annotated[
    float, option("--drain-s SECONDS", "How long answers may take after SIGTERM.", min=1, max=MOST_SECONDS)
]


@command(_EXAMPLES, "loading the model")
def serve(
    answer: Answer,
    models: _Models,
    host: Annotated[str, option("--host ADDRESS", "Where to listen.")] = "127.0.0.1",
    port: Annotated[int, option("--port", "0 for a free one.", min=0, max=65535)] = 8000,
    health_port: _HealthPort = None,
    max_batch: Annotated[int, option("--max-batch N", "Examples that are computed together.", min=1)] = 32,
    max_wait_ms: _MaxWait = 2.0,
    max_queue: Annotated[int, option("--max-queue N", "Requests that may wait; others get 429.", min=1)] = 256,
    max_body_mb: Annotated[float, option("--max-body-mb MB", "Largest request.", min=0.001, max=1000)] = 16.0,
    threads: Annotated[int | None, option("--threads N", "That compute one batch. Default: all cores.", min=1)] = None,
    keep: Annotated[int, option("--keep N", "How many of a model's newest versions are loaded.", min=1)] = 2,
    token_file: _TokenFile = None,
    public: Annotated[bool, option("--public", "Other machines may ask without a token.")] = False,
    trust_pt2: _TrustPt2 = False,
    drain_s: _Drain = 30.0,
    cluster: Annotated[str | None, option("--cluster ray://auto", "Have Ray Serve run it on a Ray cluster.")] = None,
    replicas: Annotated[int, option("--replicas N", "How many servers on the cluster.", min=1)] = 1,
) -> None:
    """Answer requests for predictions over HTTP.

    By the Open Inference Protocol (/v2/models/NAME/infer) and as TensorFlow Serving (/v1/models/NAME:predict). Open the
    address in a browser to try a model. A new version in a model's folder answers as soon as it is loaded.
    """
    # Lazily: they import onnxruntime and the server.
    from headrace.machine.extras import require_extra

    require_extra("serve", "serving")
    from headrace.serving.running import run_server
    from headrace.serving.settings import ServeSettings

    token = read_token(token_file) if token_file else os.environ.get(_TOKEN, "")
    check_access(host, token, public)
    body = round(max_body_mb * 1e6)
    settings = ServeSettings(
        max_batch=max_batch,
        max_wait_ms=max_wait_ms,
        max_queue=max_queue,
        max_body_bytes=body,
        max_held_bytes=max(2 * body, ServeSettings.max_held_bytes),
        threads=threads,
        keep=keep,
        token=token,
        any_host=not is_loopback(host),
        trust_pt2=trust_pt2,
    )
    _check_place(answer, cluster)
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.WARNING)
    if cluster is None:
        run_server(models, settings, host, port, drain_s, lambda where: _tell(answer, where), health_port)
    else:
        from headrace.serving.ray_cluster import run_on_ray

        run_on_ray(models, settings, cluster, (host, port), replicas, lambda where: _tell(answer, where))


def _check_place(answer: Answer, cluster: str | None) -> None:
    if cluster is None:
        refuse_idle(answer.given("--replicas"), "for a Ray cluster; say which by --cluster ray://auto")
        return
    refuse_idle(
        answer.given("--health-port", "--drain-s"),
        "for this machine alone; Ray Serve probes and ends its replicas itself; leave it out",
    )
    if not cluster.startswith(_RAY):
        raise UsageError(f"--cluster {cluster}: expected ray://auto, or the address of a Ray cluster")


def _tell(answer: Answer, where: Listening) -> None:
    lines = [f"serving at {where.url}"]
    if where.health:
        lines.append(f"  probes: {where.health}/v2/health/live, {where.health}/v2/health/ready")
    for name, versions in where.models.items():
        lines.append(f"  {name}, version {', '.join(map(str, versions))}: {where.url}/v2/models/{name}/infer")
    models = {name: list(versions) for name, versions in where.models.items()}
    document = {"url": where.url, "models": models}
    if where.health:
        document["health_url"] = where.health
    answer.give(document, "\n".join(lines))

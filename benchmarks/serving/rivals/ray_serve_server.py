"""`ray_serve_server.py MODEL.onnx PORT`: answers bytes with Ray Serve and its `@serve.batch`."""

from __future__ import annotations

import signal
import sys
import time

import numpy as np
import onnxruntime
from ray import serve
from starlette.requests import Request


@serve.deployment(ray_actor_options={"num_cpus": 1}, max_ongoing_requests=1000)
class Classifier:
    def __init__(self, path: str) -> None:
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        self.session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        self.name = self.session.get_inputs()[0].name

    @serve.batch(max_batch_size=32, batch_wait_timeout_s=0.002)
    async def compute(self, bodies: list[bytes]) -> list[list[float]]:
        values = np.stack([np.frombuffer(body, np.float32).reshape(3, 32, 32) for body in bodies])
        return self.session.run(None, {self.name: values})[0].tolist()

    async def __call__(self, request: Request) -> list[float]:
        return await self.compute(await request.body())


serve.start(http_options={"port": int(sys.argv[2])})
serve.run(Classifier.bind(sys.argv[1]), route_prefix="/predict")
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
while True:
    time.sleep(1)

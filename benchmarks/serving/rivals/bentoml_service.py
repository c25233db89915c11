"""A service of BentoML with its adaptive batching; see bentoml_server.py."""

from __future__ import annotations

import os

import bentoml
import numpy as np
import onnxruntime


@bentoml.service(workers=1, traffic={"timeout": 60, "max_concurrency": 1000})
class Classifier:
    def __init__(self) -> None:
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        self.session = onnxruntime.InferenceSession(
            os.environ["SERVED_MODEL"], options, providers=["CPUExecutionProvider"]
        )
        self.name = self.session.get_inputs()[0].name

    @bentoml.api(batchable=True, max_batch_size=32, max_latency_ms=1000)
    def predict(self, images: np.ndarray) -> np.ndarray:
        return self.session.run(None, {self.name: np.asarray(images, np.float32)})[0]

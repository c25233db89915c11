"""`alone.py MODEL.onnx BATCH SECONDS`: what onnxruntime alone computes; prints examples a second, and ms a call."""

from __future__ import annotations

import sys
import time

import numpy as np
import onnxruntime

path, batch, seconds = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
options = onnxruntime.SessionOptions()
options.log_severity_level = 4
session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
(form,) = session.get_inputs()
values = {form.name: np.random.default_rng(0).random((batch, *form.shape[1:]), np.float32)}
for _ in range(20):
    session.run(None, values)
began, calls = time.perf_counter(), 0
while time.perf_counter() - began < seconds:
    session.run(None, values)
    calls += 1
took = time.perf_counter() - began
print(calls * batch / took, took / calls * 1e3)

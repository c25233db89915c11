"""A push and a pull through an actor of Ray: `ray_push_pull.py ELEMENTS`; prints ms.

Arrays of NumPy, because Ray passes them through its object store without pickling their content.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
import warnings

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"

import numpy as np
import ray
import torch


@ray.remote(num_cpus=1)
class ParameterServer:
    def __init__(self, elements: int) -> None:
        torch.set_num_threads(1)
        # A pushed array may only be read, and is.
        warnings.filterwarnings("ignore", message=".*not writable")
        self.parameters = torch.zeros(elements, requires_grad=True)
        self.optimizer = torch.optim.SGD([self.parameters], lr=0.1)

    def push_pull(self, gradient: np.ndarray) -> np.ndarray:
        self.parameters.grad = torch.from_numpy(gradient)
        self.optimizer.step()
        self.parameters.grad = None
        return self.parameters.detach().numpy()


def main(elements: int) -> None:
    ray.init(address="local", num_cpus=2, include_dashboard=False, logging_level="ERROR", object_store_memory=2 << 30)
    server = ParameterServer.remote(elements)
    gradient, parameters = np.ones(elements, np.float32), np.zeros(elements, np.float32)
    took = []
    for _ in range(3 + (500 if elements < 1_000_000 else 20)):
        began = time.perf_counter()
        np.copyto(parameters, ray.get(server.push_pull.remote(gradient)))
        took.append(time.perf_counter() - began)
    assert np.allclose(parameters, -0.1 * len(took), rtol=1e-3), parameters[:3]
    ray.shutdown()
    print(1e3 * statistics.fmean(took[3:]), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))

"""`bentoml_server.py MODEL.onnx PORT`: answers JSON with BentoML."""

from __future__ import annotations

import os
import sys

os.environ["SERVED_MODEL"] = sys.argv[1]
os.environ["BENTOML_DO_NOT_TRACK"] = "True"
os.chdir(os.path.dirname(os.path.abspath(__file__)))
command = [sys.executable, "-m", "bentoml", "serve", "bentoml_service:Classifier", "--port", sys.argv[2]]
os.execv(sys.executable, command)

"""How requests and answers look: HTTP, the Open Inference Protocol, TensorFlow Serving, OpenAPI."""

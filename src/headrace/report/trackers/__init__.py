"""A run's events for the services that keep curves: TensorBoard, MLflow, Weights & Biases."""

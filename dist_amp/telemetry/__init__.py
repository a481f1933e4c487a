"""Metrics, their asynchronous copy, and how they are shown: TensorBoard, JSON lines, console."""

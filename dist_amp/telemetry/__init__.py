"""The measurements of a run, from the step to its files.

A step returns a `StepReport` whose tensors stay on the device (step_report.py); `Metrics` collects
them (metrics.py, sums.py). At a log step each rank starts one copy of its metrics to the host and
continues. One step later, while the device computes, each rank reads its copy and the ranks gather
one row of numbers each. Their table, a `LogRow`, is written to metrics.jsonl and TensorBoard
(writers.py). Everything else that watches a run is an `Observer` (observer.py): the console,
goodput, health, MFU and startup times add tags to these rows or entries to summary.json.
"""

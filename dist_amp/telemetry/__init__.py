"""The measurements of a run, from the step to its files.

A step returns a `StepReport` whose tensors stay on the device (step_report.py). `Metrics` collects
the reports (metrics.py, sums.py). At a log step each rank starts one copy of its metrics to the
host and continues training. One step later, while the device computes, each rank reads its copy,
and the ranks all-gather one row of numbers each. The table of all rows, a `LogRow`, is written to
metrics.jsonl and TensorBoard (writers.py). All else that watches a run is an `Observer`
(observer.py), such as console, goodput, health and MFU; it may add tags, and summary.json entries.
"""

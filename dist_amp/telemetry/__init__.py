"""The measurements of a run, from the step to its files.

A step returns a `StepReport`, whose tensors stay on the device (step_report.py). `Metrics` collects
them (metrics.py, sums.py). At a log step each rank starts one copy of its figures to the host, and
goes on; one step later they have arrived, the ranks exchange a row of numbers each, and the table
of all ranks, a `LogRow`, is written to metrics.jsonl and TensorBoard (writers.py). Nothing waits
for the device. Whatever else watches a run is an `Observer` (observer.py): the console, goodput,
health, MFU and start-up times add figures to these rows, or entries to summary.json.
"""

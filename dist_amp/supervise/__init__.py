"""The process around the loop: signals, preflight checks, watchdog, a run's start and end."""

"""The process around the training loop: start, signals, watchdog, end. Start at failure.py."""

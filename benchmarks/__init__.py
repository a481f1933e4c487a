"""Benchmarks of time, memory and traffic: python -m benchmarks lists them."""

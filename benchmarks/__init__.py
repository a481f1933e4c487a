"""What things cost, measured: python -m benchmarks lists the benches."""

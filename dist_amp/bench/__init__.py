"""What things cost, measured: python -m dist_amp.bench lists the benches."""

"""What things cost, measured; each file but harness.py is a command."""

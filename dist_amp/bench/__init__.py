"""What things cost, measured; each file is a command."""

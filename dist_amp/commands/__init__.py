"""The commands other than train and verify. No other folder of the package imports these files."""

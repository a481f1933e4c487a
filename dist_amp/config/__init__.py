"""Settings from defaults, TOML files, the environment and the command line, checked together."""

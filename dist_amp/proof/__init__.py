"""What `python -m dist_amp.verify` is made of; nothing outside of that command imports it."""

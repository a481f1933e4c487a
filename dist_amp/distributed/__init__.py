"""How a process becomes a rank: its place, device, rendezvous, process groups and signals."""

"""How a process becomes a rank: device, rendezvous, process groups and signals."""

"""The steps by which a process becomes a rank: device, rendezvous, process groups and signals."""

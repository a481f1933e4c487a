"""What watches a run and names what is wrong with it: each an observer that can be deleted."""

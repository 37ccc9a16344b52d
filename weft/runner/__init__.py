"""One rank's tensors: it runs what the scheduler decided, and decides nothing about requests."""

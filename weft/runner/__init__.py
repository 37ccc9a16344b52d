"""One rank's tensors: it obeys the scheduler's orders and decides nothing about requests."""

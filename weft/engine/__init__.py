"""The loop, and the offline interface around it."""

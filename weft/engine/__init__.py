"""The engine: its loop, its processes, and the offline interface."""

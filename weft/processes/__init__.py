"""The life of a process: start-up, log, heartbeat, supervision of child processes."""

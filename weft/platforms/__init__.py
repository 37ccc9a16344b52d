"""The platform of a process: its processor and its version of Triton."""

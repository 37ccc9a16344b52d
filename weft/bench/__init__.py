"""Benchmarks of the engine through its public interface."""

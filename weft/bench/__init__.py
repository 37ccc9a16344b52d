"""Benchmarks of the engine through its public interface.

Job: workloads with a fixed definition, and their figures. Owns: the workloads. Does not know: flags, engine internals.
"""

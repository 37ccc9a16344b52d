"""Names of vLLM's Python package for Weft's own classes, and the classes that only scripts for vLLM use.

A script for vLLM runs with ``vllm`` replaced by ``weft`` in its imports, or ends with a sentence that names the remedy.
"""

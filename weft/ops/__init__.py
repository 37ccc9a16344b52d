"""Operations of the model, one folder per family.

A family's ``__init__.py`` holds its operations: docstring, torch reference, dispatch by explicit backend. The other
modules of the folder hold Triton kernels and tuned tables. ``x_triton`` launches the kernels of an operation ``x``.
``triton/`` holds what kernels of several families share.
"""

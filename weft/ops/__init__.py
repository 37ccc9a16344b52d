"""Operations of the model, one folder per family.

A family's ``__init__.py`` holds its operations: docstring, torch reference, dispatch by explicit backend. The other
modules of the folder hold the Triton kernels, the ``x_triton`` function that launches them for each operation ``x``,
and tuned tables. ``triton/`` holds what kernels of several families share.
"""

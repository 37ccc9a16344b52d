"""Operations of the model: each a torch reference and a dispatch by explicit backend; kernels in ``triton/``."""

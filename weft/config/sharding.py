"""Arithmetic of splitting a dimension over ranks."""

from weft.errors import ConfigError


def divide(total: int, size: int, what: str) -> int:
    """``total / size``, the share of one rank.

    Raises:
        ConfigError: ``total`` is not divisible by ``size``.
    """
    if total % size:
        raise ConfigError(
            f"{what}={total} is not divisible by tensor_parallel_size={size}; "
            "choose a tensor_parallel_size that divides it"
        )
    return total // size


def head_range(num_heads: int, rank: int, size: int, what: str) -> range:
    """The heads of one rank. If there are fewer heads than ranks, neighbouring ranks hold the same head.

    Raises:
        ConfigError: neither number divides the other.
    """
    if num_heads >= size:
        share = divide(num_heads, size, what)
        return range(rank * share, (rank + 1) * share)
    if size % num_heads:
        raise ConfigError(
            f"{what}={num_heads} cannot be replicated evenly over tensor_parallel_size={size}; "
            f"choose a tensor_parallel_size that is a multiple or a divisor of {num_heads}"
        )
    head = rank * num_heads // size
    return range(head, head + 1)

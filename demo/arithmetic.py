"""How one calculation is written out, in steps small enough for a small model.

Owns the written form of sums, differences, products and quotients.
Knows nothing of word problems or chats.

A sum or a product is split by place value, so every part is one fact between single digits:
    347 + 286: 500 + 120 + 13 = 633          47 × 6: 240 + 42 = 282
A difference takes one place after another away, so every step changes few digits:
    633 - 128: 633 - 100 = 533, - 20 = 513, - 8 = 505
A calculation that needs no splitting is written directly: 7 × 6 = 42.
"""

LARGEST_RESULT = 1998  # 999 + 999; a later step accepts operands to 999 only
SIGNS = {"+": "+", "-": "-", "*": "×", "/": "÷"}


def allowed(op: str, a: int, b: int) -> bool:
    """Whether the model is asked to calculate this: ranges, and no negative or broken results."""
    if not (0 < a <= 999 and 0 < b <= 999):
        return False
    if op == "+":
        return True
    if op == "-":
        return a > b
    if op == "*":
        return min(a, b) <= 9 and max(a, b) <= 99
    return 2 <= b <= 9 and a % b == 0 and 2 <= a // b <= 9


def result(op: str, a: int, b: int) -> int:
    """The value of one step."""
    return {"+": a + b, "-": a - b, "*": a * b, "/": a // b}[op]


def places(a: int) -> list[int]:
    """The non-zero place values of a number, largest first: 406 -> [400, 6]."""
    digits = str(a)
    return [int(d) * 10 ** (len(digits) - i - 1) for i, d in enumerate(digits) if d != "0"]


def write(op: str, a: int, b: int) -> str:
    """One calculation, worked."""
    parts = {"+": _sum_parts, "-": _difference_parts, "*": _product_parts, "/": lambda a, b: []}[op](a, b)
    value, head = result(op, a, b), f"{a} {SIGNS[op]} {b}"
    if len(parts) < 2:
        return f"{head} = {value}"
    if op == "-":
        return f"{head}: {a} " + ", ".join(f"- {part} = {left}" for part, left in parts)
    return f"{head}: " + " + ".join(map(str, parts)) + f" = {value}"


def _sum_parts(a: int, b: int) -> list[int]:
    scale = 10 ** (max(len(str(a)), len(str(b))) - 1)
    parts = []
    while scale:
        parts.append((a // scale % 10 + b // scale % 10) * scale)
        scale //= 10
    return [part for part in parts if part]


def _difference_parts(a: int, b: int) -> list[tuple[int, int]]:
    steps = []
    for part in places(b):
        a -= part
        steps.append((part, a))
    return steps


def _product_parts(a: int, b: int) -> list[int]:
    long, short = max(a, b), min(a, b)
    return [part * short for part in places(long)]

"""Quantisation of a checkpoint's linear layers: ``quantization_config`` in one vocabulary.

Job: the forms of stored weights, and the rules that assign a form to each module. Does not know: the
keys of published configs (``quantization_formats.py``), tensors, layers, kernels (``weft/quantization``).
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Literal

BLOCK = 128
"""Side of the squares of a weight that share a scale under ``block``, and number of inputs of a token that share a
scale."""

Form = Literal["fp8", "mxfp8", "int4", "int8", "fp4"]


@dataclass(frozen=True, slots=True)
class Scheme:
    """How the weight of a linear layer is stored, and how its inputs are rounded.

    Attributes:
        source: the arrangement of the tensors in a checkpoint, or ``"online"``: quantised while weights load.
        form: what a stored number means. ``fp8`` and ``mxfp8`` are e4m3, ``fp4`` is e2m1, the others are integers.
        weights: the weights that share a scale: a ``block`` of 128 x 128, a ``channel`` (row), the whole ``tensor``, or
            a ``group`` of consecutive weights of a row.
        activations: the inputs that share a scale: a ``group`` of 128 of one token, or a ``token``. ``static``: all
            inputs, with a scale from the checkpoint. ``none``: inputs are not rounded.
        group: weights of a ``group``.
        symmetric: zero has the code in the middle. Otherwise each group has its own code for zero.
        scales: what a stored scale is. ``e8m0`` is a power of two.
        drops_activations: the checkpoint was made for rounded inputs, but Weft does not round them.
    """

    source: Literal["fp8", "compressed-tensors", "gptq", "gptq_v2", "awq", "gpt-oss", "modelopt", "online"]
    form: Form
    weights: Literal["block", "channel", "tensor", "group"]
    activations: Literal["group", "token", "static", "none"]
    group: int = 0
    symmetric: bool = True
    scales: Literal["float", "e4m3", "e8m0"] = "float"
    drops_activations: bool = False

    @property
    def bytes_per_weight(self) -> float:
        """Bytes of a weight and of its part of a scale; scales of FP8 are left out."""
        if self.form == "fp8":
            return 1.0
        shared = (2 if self.scales == "float" else 1) + (not self.symmetric)
        return (1.0 if self.form in ("int8", "mxfp8") else 0.5) + (shared / self.group if self.group else 0.0)

    @property
    def name(self) -> str:
        """The form as people call it."""
        return {"e4m3": "nvfp4", "e8m0": "mxfp4"}[self.scales] if self.form == "fp4" else self.form


@dataclass(frozen=True, slots=True)
class Rule:
    """Modules and the form of their weights.

    Attributes:
        scheme: None: their weights are not quantised.
        patterns: names and patterns of the modules; none: every module.
        match: how patterns are compared with a name, a key of ``MATCHERS``.
    """

    scheme: Scheme | None
    patterns: tuple[str, ...] = ()
    match: Literal["exact", "part", "inside", "begin"] = "exact"

    def applies(self, names: Iterable[str]) -> bool:
        return not self.patterns or any(MATCHERS[self.match](self.patterns, name) for name in names)


@dataclass(frozen=True, slots=True)
class QuantizationConfig:
    """The forms of a model's linear layers.

    Attributes:
        source: the checkpoint's ``quant_method``, or ``"online"``: weights are quantised while they load.
        rules: the first rule that applies to a module decides. A module without a rule is not quantised.
        kv_cache: the checkpoint holds scales of an FP8 KV cache.
    """

    source: str
    rules: tuple[Rule, ...]
    kv_cache: bool = False

    def scheme(self, names: Iterable[str]) -> Scheme | None:
        """The form of a linear layer, by the names that it may have in a checkpoint; None: not quantised."""
        names = tuple(names)
        return next((rule.scheme for rule in self.rules if rule.applies(names)), None)

    @property
    def schemes(self) -> tuple[Scheme, ...]:
        """Every form that some module may have."""
        return tuple(dict.fromkeys(rule.scheme for rule in self.rules if rule.scheme is not None))

    @property
    def main(self) -> Scheme:
        """The form of most modules: the one of the most general rule."""
        return self.schemes[-1]

    @property
    def name(self) -> str:
        """The forms as people call them: ``int4``, or ``fp8 and int4``."""
        return " and ".join(dict.fromkeys(scheme.name for scheme in self.schemes))


ONLINE = QuantizationConfig("online", (Rule(Scheme("online", "fp8", "channel", "token")),))
"""The form of ``--quantization fp8``: a scale per output channel and, at run time, one per token."""

ONLINE_INT4 = QuantizationConfig("online", (Rule(Scheme("online", "int4", "group", "none", BLOCK)),))
"""The form of ``--quantization int4``: a scale for 128 weights of a row; for 64 or 32 where 128 do not divide it."""

ONLINE_FORMS = {"fp8": ONLINE, "int4": ONLINE_INT4}


_PLAIN = re.compile(r"[\w.-]+")


@lru_cache(maxsize=64)
def _split(patterns: tuple[str, ...]) -> tuple[frozenset[str], tuple[str, ...]]:
    """Plain names, and patterns with other characters. A checkpoint may list a name for each of its layers, and names
    are found in a set without a look at the others."""
    bare = [pattern.removeprefix("re:") for pattern in patterns]
    return frozenset(bare), tuple(pattern for pattern in bare if not _PLAIN.fullmatch(pattern))


def _matches_part(patterns: tuple[str, ...], name: str) -> bool:
    """Whether a pattern of ``quant_method: fp8`` matches: a module's name, the name of a parent, the end of the name
    after a dot, or a regular expression for the name or a parent's."""
    names, expressions = _split(patterns)
    parts = name.split(".")
    beginnings, ends = accumulate(parts, "{}.{}".format), (".".join(parts[i:]) for i in range(1, len(parts)))
    if not names.isdisjoint((*beginnings, *ends)):
        return True
    return any(re.match(rf"(?:{pattern})(?:\.|$)", name) for pattern in expressions)


def _matches_exactly(patterns: tuple[str, ...], name: str) -> bool:
    """Whether a pattern of ``compressed-tensors`` matches: the name, or after ``re:`` a regular expression for its
    beginning. ``Linear`` matches every linear layer."""
    if name in patterns or "Linear" in patterns:
        return True
    return any(re.match(pattern.removeprefix("re:"), name) for pattern in patterns if pattern.startswith("re:"))


def _matches_inside(patterns: tuple[str, ...], name: str) -> bool:
    """Whether a pattern of AWQ matches: a part of the name."""
    return any(pattern in name for pattern in patterns)


def _matches_begin(patterns: tuple[str, ...], name: str) -> bool:
    """Whether a pattern of GPTQ or AutoRound matches: the name, or a regular expression for its beginning."""
    return name in patterns or any(re.match(pattern, name) for pattern in patterns)


MATCHERS = {
    "exact": _matches_exactly,
    "part": _matches_part,
    "inside": _matches_inside,
    "begin": _matches_begin,
}

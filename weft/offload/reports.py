"""Prefixes below the device, as a replica reports them to the router of replicas.

The router knows prefixes by hashes of its own (``weft/engine/prefix_hashes.py``), the tier by keys. Entries of the
tier were on the device before. So every hash that was reported from the device is remembered with its key.
"""

from collections import OrderedDict
from collections.abc import Collection

from weft.cache.nodes import Node
from weft.cache.spec import CacheSpec
from weft.offload.tier import HostTier

MAX_REMEMBERED = 8192
"""Upper bound on hashes that are remembered, the latest ones."""

UNMEASURED_PRICE = 0.1
"""Price before restores and prefills were measured."""


class PrefixReports:
    """The part of an engine's reported prefixes that its tier has."""

    def __init__(self, tier: HostTier, spec: CacheSpec) -> None:
        self._tier, self._spec = tier, spec
        self._keys: OrderedDict[int, bytes] = OrderedDict()

    def on_device(self, value: int, node: Node, position: int, *, is_start: bool) -> None:
        """Note a hash of the prefix up to ``position``. ``is_start``: whether a request could start there."""
        if value not in self._keys:
            keys, has_state = self._tier.keys, is_start and self._spec.has_states
            self._keys[value] = keys.of_state(node, position)[1] if has_state else keys.before(node, position)
        self._keys.move_to_end(value)

    def below(self, on_device: Collection[int]) -> list[int]:
        """The hashes that are in the tier and not on the device. Others that are not on the device are forgotten."""
        found, device = [], set(on_device)
        for value, key in list(self._keys.items()):
            if value not in device:
                if self._tier.index.has(key):
                    found.append(value)
                else:
                    del self._keys[value]
        while len(self._keys) > MAX_REMEMBERED:
            self._keys.popitem(last=False)
        return found

    @property
    def price(self) -> float:
        """The cost of restoring a token, as a share of the cost of computing it."""
        costs, spec = self._tier.costs, self._spec
        computing = costs.seconds_to_compute(spec.flops_per_token)
        if costs.bytes_per_s is None or not computing:
            return UNMEASURED_PRICE
        return min(1.0, spec.kv_bytes_per_token / costs.bytes_per_s / computing)

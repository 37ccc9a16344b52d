"""Building blocks of models: they own parameters, know their sharding, and call ``weft/ops``."""

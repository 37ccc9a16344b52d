"""Settings: what the user may set, how the rest is chosen, and the geometry of models.

Job: one frozen ``EngineConfig``, resolved once. Owns: fields, aliases, validation, checkpoint configs. Does not know:
torch, memory, or anything of devices but whether there is a GPU.
"""

from typing import TYPE_CHECKING, Any

from weft.config.fields import EngineConfig
from weft.config.resolution import resolve

__all__ = ["EngineConfig", "resolve"]


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """Find names that vLLM has in its module of this name."""
        import weft

        return weft.find_name(__name__, name)

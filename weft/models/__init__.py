"""Models: a shared decoder, and the weight names of each architecture."""

"""The processor and the Triton that Weft runs on."""

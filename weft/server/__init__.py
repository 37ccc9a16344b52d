"""The HTTP server: the OpenAI protocol over an engine in a process of its own."""

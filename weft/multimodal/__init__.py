"""Images and videos of requests: the data that travels from the input processor to the encoder."""

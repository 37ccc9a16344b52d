"""Work beside the main chain of a captured graph: launches on a second stream, which become a branch of the graph.

The branch starts when all launches before it have ended. Launches after the branch wait for the branch and the main
chain. Memory that is allocated in the branch belongs to its stream and is used there alone.
"""

import functools
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


@contextmanager
def graph_branch(device: torch.device) -> Iterator[AbstractContextManager[object]]:
    """Fork, and join at the end of the body, also after an error: a capture cannot end while a stream is forked.

    Yields the scope whose launches go to the branch; the body's others run beside them. Where there are no streams all
    run in order.
    """
    if device.type != "cuda":
        yield nullcontext()
        return
    stream = _stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    try:
        yield torch.cuda.stream(stream)
    finally:
        torch.cuda.current_stream(device).wait_stream(stream)

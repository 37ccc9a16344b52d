"""The choice of what runs in the next step: admission, chunked prefill, preemption. Plain numbers only."""

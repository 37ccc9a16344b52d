"""What runs in the next step: admission, chunked prefill, preemption. Decides with plain numbers only."""

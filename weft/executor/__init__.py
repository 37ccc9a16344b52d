"""Transport of scheduler outputs to the ranks and of results back."""

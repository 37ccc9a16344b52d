"""Transport of orders to the ranks and of results back."""

"""Quality against cost of finished runs, measured under one protocol."""

"""Quality and cost, measured: perplexity, FLOPs, latency, the cost of an output layer."""

"""The only place that knows the internals of Hugging Face models."""

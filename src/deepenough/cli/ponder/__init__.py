"""`deepenough ponder ...`: classifiers that think as long as the input needs."""

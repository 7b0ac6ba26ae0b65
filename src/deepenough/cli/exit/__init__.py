"""`deepenough exit ...`: the same model, sooner."""

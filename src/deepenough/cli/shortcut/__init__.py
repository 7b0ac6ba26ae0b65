"""`deepenough shortcut ...`: how early a model knows its answer."""

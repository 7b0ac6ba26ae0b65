"""One training loop for every method, with its schedules, checkpoints and distribution."""

"""PAR: choose the blocks of a language model (Pay Attention when Required, arXiv 2009.04534)."""

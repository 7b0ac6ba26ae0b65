"""The explorer: a page of one's own machine on which models are tried live."""

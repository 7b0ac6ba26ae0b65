"""Measure what the documents claim: one file per claim, one result file per benchmark."""

"""Trained models of deepenough, one folder each: card, settings, records, 16-bit weights."""

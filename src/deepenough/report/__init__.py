"""Reports and pictures of runs, from their files alone: no model is loaded, nothing is measured.

Figures are built by the methods' `figures.py` as `deepenough.figure.FigureSpec`; here they are
drawn, by matplotlib (`drawing`, `charts`, `pictures`) and by a page of its own (`page`).
"""

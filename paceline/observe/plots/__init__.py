"""Plots of runs: their curves, the panels that show them, and the page that has the panels."""

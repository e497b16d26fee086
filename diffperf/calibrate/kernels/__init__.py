"""Fits of kernel libraries to measured kernel times."""

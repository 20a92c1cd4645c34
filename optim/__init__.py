"""Gradient transformations as pure functions over parameter trees."""

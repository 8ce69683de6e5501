"""Mixtures of experts: routing, balancing and dispatch."""

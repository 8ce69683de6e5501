"""Analysis of runs and data: evaluate, predict, compare, crossval, plan, inspect, lr-find, doctor and other verbs."""

"""Constants of Muon, the same in every engine."""

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the quintic iteration (Jordan et al., 2024): they maximise its slope at 0, and leave singular values within 0.7 to 1.2."""
NUM_ITERATIONS = 5
UPDATE_RMS = 0.2
"""Root mean square of an update in units of the learning rate, about that of AdamW, so that one rate fits both (Liu et al., 2025)."""
MAX_BATCH_ELEMENTS = 1 << 25
"""Elements of the matrices that are updated together; more would only take memory for copies of them."""
EPSILON = 1e-7

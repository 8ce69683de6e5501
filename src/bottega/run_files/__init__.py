"""The files that a run has written, read without a framework: logs as series, configuration, state, and all of them as one record."""

"""`bottega doctor`: whether this machine can train, and what to do where it cannot.

`examine.py` runs the checks, a file each: packages, devices (with matrix products), communication, disk and limits. Whatever loads torch or
another package with native code runs in a child process (`probes.py`), because a broken installation may crash or hang while it is
imported, and the report must not.
"""

"""Files that outlive a crash: replaced as a whole, sealed by a checksum, locked by the living.

Nothing here needs more than Python itself. What is guaranteed stands in docs/guarantees.md.
"""

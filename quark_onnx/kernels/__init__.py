"""Number formats that numpy has no type for, as exact numpy references that every other
implementation is held to.
"""

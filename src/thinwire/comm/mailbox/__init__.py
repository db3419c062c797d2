"""Messages between two ranks, that nobody else need know of: posted without waiting, answered while training goes
on.
"""

"""Who comes first: a step that ends when enough ranks have arrived, with late ones brought up to date afterwards.

One rank, the keeper, counts arrivals in the thread in which its messages come, and says which ranks are members of a
step. Members add up their gradients by messages among themselves. A step counts when the keeper has heard from all its
members that they hold the result; until then it can be tried again with others. Whoever was not a member takes the
state of one who was.
"""

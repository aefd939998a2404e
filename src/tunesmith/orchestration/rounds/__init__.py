"""Rounds: the runs that a campaign opens by itself.

`facts` reads, `rules` decides whether (asking `triggers/`), `start_point` from where, `method` pairs or answers; `open`
submits, `scheduler` looks every so often, `history` tells what earlier ones have brought.
"""

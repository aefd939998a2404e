"""Forgetting: erase an experience from the store, from datasets and from what is still to be trained.

Who asks this package: submit, worker and control in `orchestration/` (a run that would learn it ends),
`training/train.py` (its result is not believed), `deployment/queries.py` (its version does not go live).
"""

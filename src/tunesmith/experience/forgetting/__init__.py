"""Forgetting: erase an experience from the store, from datasets and from what is still to be trained.

Who asks this package: `orchestration/submit.py` (refuses a dataset that is still to be rewritten), `control` and
`worker` (end runs, rewrite datasets), `lifecycle` (a result is not believed), `training/train.py` (does not begin),
`deployment/queries.py` (does not go live); `client/experiences.py` starts it. Its table is in `experience/tables.py`.
"""

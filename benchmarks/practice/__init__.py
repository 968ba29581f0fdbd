"""Ordinary trainings × methods: does a posterior help the networks that people have?

    make practice          # the smaller half of REPORT, about 20 minutes on two cores
    FULL=1 make practice   # all of it

| file | |
|---|---|
| `setups` | which networks are trained on what: CHOOSE, to choose rules on, and REPORT, to judge them on |
| `tasks`, `networks` | the data of a set-up, split; its network and LightningModule |
| `training` | trains, or reads what an earlier run has trained |
| `gaussians` | caches the Gaussian over outputs for many priors, to try a rule in milliseconds |
| `methods`, `subject`, `scores` | trained network to predictions, predictions to numbers |
| `results`, `comparison`, `report`, `targets` | numbers to a CSV; the CSV to Markdown tables and a list of targets |
| `pages` | the kept rows to the tables of README and `docs/choosing.md` |
| `stages` | what is done with each set-up, in several processes |
"""

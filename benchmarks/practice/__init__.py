"""Every method on ordinary training runs: does a posterior help common networks?

    make practice          # the smaller half of REPORT, about 20 minutes on two cores
    FULL=1 make practice   # all of it

| file | |
|---|---|
| `setups` | networks and their training data: CHOOSE, to choose rules on, and REPORT, to judge them on |
| `tasks`, `networks` | the data of a setup, split; its network and LightningModule |
| `training` | trains, or reads the results of an earlier run |
| `gaussians` | caches the Gaussian over outputs for many priors, to try a rule in milliseconds |
| `methods`, `subject`, `scores` | trained network to predictions, predictions to numbers |
| `results`, `comparison`, `report`, `targets` | numbers to a CSV; the CSV to Markdown tables and a list of targets |
| `unknown` | scores of unknown inputs, on networks with held-out classes and on two public ResNets; their tables |
| `pages` | the kept rows to the tables of README and `docs/choosing.md` |
| `stages` | the work on each setup, in several processes |
"""

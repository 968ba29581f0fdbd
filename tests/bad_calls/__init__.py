"""The catalogue of calls that cannot work; `tests/test_bad_calls.py` makes every one of them.

A row is one line in the table of the thing that is called. The names of the arguments are compared with those of the
signatures, so that a new argument needs a row, or a place among those of which anything goes. What option objects
refuse is in `tests/options`.
"""

from bad_calls.callbacks import CALLBACKS
from bad_calls.cases import Table, Things, clearness
from bad_calls.conformal import CONFORMAL
from bad_calls.files import FILES
from bad_calls.fitting import FITTING
from bad_calls.likelihoods import LIKELIHOODS
from bad_calls.measurements import MEASUREMENTS
from bad_calls.metrics import METRICS
from bad_calls.mixins import MIXINS
from bad_calls.networks import NETWORKS
from bad_calls.plots import PLOTS
from bad_calls.using import USING

TABLES = [*CALLBACKS, *MIXINS, *FITTING, *NETWORKS, *USING, *CONFORMAL, *LIKELIHOODS, *METRICS, *PLOTS, *FILES]
TABLES += MEASUREMENTS

__all__ = ["TABLES", "Table", "Things", "clearness"]

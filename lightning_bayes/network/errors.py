"""What can go wrong between a user's network and data and its curvature: one exception per kind of mistake."""

# What torch and Python raise of themselves; subclasses, such as out of memory, mean something of their own.
PLAIN = (RuntimeError, TypeError, ValueError, IndexError, KeyError, AttributeError, NotImplementedError)


class CurvatureError(RuntimeError):
    """The network or its curvature cannot be handled; the message names the layer and a way out."""


class NetworkError(CurvatureError):
    """The network cannot be run on an input; the message says on what, and holds the network's own."""


class OutputError(NetworkError):
    """What the network returns is not what `output=` or `class_dim=` says."""


def not_finite(name: str) -> CurvatureError:
    return CurvatureError(
        f"{name}: the curvature is not finite; the network's gradients overflow there (half precision, or exploding "
        "activations?): use a wider dtype or leave the parameter out of the subset"
    )


def no_second_derivative(reason: str) -> CurvatureError:
    return CurvatureError(
        "the covariance has no gradient in x, because an operator of the network has no second derivative "
        f"({reason}): use predictive='bnn' or 'map'"
    )


class ProcessError(RuntimeError):
    """Another process has failed; the message is that of its error."""


class DataError(ValueError):
    """A batch is not of the form `(x, y)`, or holds values that cannot be used."""


class SubsetError(ValueError):
    """The choice of parameters does not fit the network."""
